"""`bench simulate`: drafters and policies on recorded texts, without the model."""
