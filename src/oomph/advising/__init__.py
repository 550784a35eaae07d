"""What a model's architecture costs, and what would change it. Advice only: nothing is changed."""
