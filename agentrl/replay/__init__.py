"""Replay: what a run directory holds is computed and executed once more, and compared with what was recorded.

`iteration.replay_iteration` computes rewards, advantages and losses of an update again, without any weights;
`episode.replay_episode` executes the recorded messages in a fresh world, and needs no torch.
"""
