"""What ds_cp knows of single model families: attention, masks and positions that are their own."""
