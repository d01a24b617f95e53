"""`eden`: randomised, unbiased; for gradients."""
