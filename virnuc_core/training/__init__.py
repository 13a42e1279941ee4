"""Training of the classifier (head): data splits, fitting, evaluation and the model card."""
