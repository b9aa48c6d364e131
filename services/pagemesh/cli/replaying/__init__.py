"""What ``pagemesh replay`` does: read a trace, run the pager on it, and compute the optimum."""
