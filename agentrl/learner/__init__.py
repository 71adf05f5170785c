"""From trajectories to gradients: credit assignment, losses, the actor-critic, PPO, SFT, checkpoints. Needs torch."""
