"""What a run costs its drives: what they have been written, what they are rated for, how long they last."""
