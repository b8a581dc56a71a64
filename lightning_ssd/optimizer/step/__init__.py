"""Call the user's own step subgroup by subgroup: check the optimizer, cut parameters and states, join the results."""
