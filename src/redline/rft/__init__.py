"""Rejection-sampling fine-tuning: sample answers, keep the correct ones, train on them, test before and after."""
