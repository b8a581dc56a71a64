"""An optimizer whose states are offloaded to drives and updated subgroup by subgroup."""
