"""Code shared by the study scripts: tasks, nets of equal size, training, tables and figures."""
