"""`paceline learn`: a drafter for a model, from prompts that the model writes itself."""
