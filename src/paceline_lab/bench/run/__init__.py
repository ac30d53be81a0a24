"""`bench run`: drafters against plain decoding on a suite of prompts."""
