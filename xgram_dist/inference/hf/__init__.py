"""The Hugging Face model. An exported folder holds copies of these files; they need torch and transformers alone."""
