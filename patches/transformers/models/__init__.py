"""What ds_cp knows about single model families: attention, masks, positions and recurrences of their own."""
