"""What the commands of ``pagemesh cache`` share."""
