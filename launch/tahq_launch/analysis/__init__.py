"""Commands that explain: what codecs do to tensors and gradients, and what a run spent its steps on."""
