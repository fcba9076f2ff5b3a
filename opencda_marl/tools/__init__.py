"""What people measure and check with: bench, profile, verify-resume, doctor."""
