"""What is wrong with a model and what is slow: a step watched and profiled, checks over what was seen, findings by cost."""
