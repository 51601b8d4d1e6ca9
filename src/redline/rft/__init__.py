"""Rejection-sampling fine-tuning: sample many answers a question, keep those that are right, train on them,
test before and after."""
