"""The three-modality model, written for one device: a list of layers that pass tuples of tensors along."""
