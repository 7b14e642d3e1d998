"""What is asked: prompts with the columns that their rewards need."""
