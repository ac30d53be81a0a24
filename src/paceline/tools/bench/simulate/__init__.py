"""`bench simulate`: drafters and policies over known texts, without their model."""
