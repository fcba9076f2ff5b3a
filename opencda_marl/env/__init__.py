"""What vehicles see, do and earn; wired around a simulator in `env.driving`."""
