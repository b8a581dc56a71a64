"""An optimizer whose states wait on drives and are updated subgroup by subgroup."""
