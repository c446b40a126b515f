"""What the study scripts share: tasks, nets of equal size, training, tables and figures."""
