"""Rejection-sampling fine-tuning: sample many answers to each question, keep the correct ones, train on them, and
test before and after."""
