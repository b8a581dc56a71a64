"""From one pass to the next: profile it, plan the next one, hold predictions against measurements."""
