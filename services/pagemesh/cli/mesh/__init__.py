"""What ``pagemesh up`` does: start, watch, restart and stop the processes of a mesh."""
