"""`m3-server check`: whether a checkpoint folder can be served, found out without loading it."""
