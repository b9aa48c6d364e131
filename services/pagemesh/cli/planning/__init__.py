"""What ``pagemesh plan`` computes: a model's shape, its pages, and what fits where."""
