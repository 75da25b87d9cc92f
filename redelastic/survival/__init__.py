"""Workers that survive: a training script whose process and state outlive the rounds that it takes part in."""
