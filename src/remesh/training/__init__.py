"""What a training script uses: when to save, what to keep, how to resume as the same run."""
