"""Reinforcement learning from verifiable rewards: `redline.rl.run.reinforce(recipe, plan, run, process)`."""
