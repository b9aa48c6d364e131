"""What ``pagemesh replay`` does: read a trace, run the pager on it, and say what was possible."""
