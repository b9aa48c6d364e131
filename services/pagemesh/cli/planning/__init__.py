"""What ``pagemesh plan`` works out: a model's shape, its pages, and what fits where."""
