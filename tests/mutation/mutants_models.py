"""What is broken on purpose between trajectories, models and losses: (old text, new text, what breaks), by module."""

from __future__ import annotations

MUTANTS: dict[str, list[tuple[str, str, str]]] = {
    "agentrl/learner/batch.py": [
        ("row.action_N - 1 + start for", "row.action_N + start for", "states are one token late"),
        ("start + row.n_tokens - 1 for", "start + row.n_tokens - 2 for", "the final state"),
        ("number * width + start))", "start))", "every line reads the first one's states"),
        ("row.token_ids_T[row.action_N] for", "row.token_ids_T[row.action_N - 1] for", "targets are one token early"),
        (
            "torch.arange(first_B[index], first_B[index + 1])",
            "torch.arange(first_B[index + 1] - first_B[index])",
            "places",
        ),
        ("torch.tensor([index for index, _, _ in placed])", "torch.arange(len(placed))", "which rows these are"),
        ("positions.append(torch.arange(end - start))", "positions.append(torch.arange(start, end))", "packed places"),
        ("start, end = end, end + rollout", "start, end = 0, end + rollout", "packed rows lie on each other"),
        ("packed.turn_id_T[action_N]", "packed.turn_id_T[action_N * 0]", "turn ids"),
        ("        trajectory.end.bootstraps,", "        False,", "cuts bootstrap"),
        ("if not trajectory.end.in_loss:", "if False:", "errors are left out"),
        ("len(groups)) for row in rows]", "len(groups) + 1) for row in rows]", "groups count from 0"),
        ("if packed.is_action_T[0]:", "if False:", "a first token without a state before it"),
        ("if n > context:", "if False:", "rows beyond the context"),
        ("(logprob_N > 1e-3).any()", "(logprob_N > 1e3).any()", "probabilities for logprobs"),
        ("groups.setdefault(row.task, len(groups))", "groups.setdefault(row.episode, len(groups))", "test_batch.py"),
    ],
    "agentrl/learner/trunk.py": [
        ("torch.cat([batch.state_N, batch.final_B])", "torch.cat([batch.state_N + 1, batch.final_B])", "state shift"),
        ("use_cache=False)\n    hidden_BTH", "use_cache=True)\n    hidden_BTH", "packed rows see each other (T11)"),
        ("position_ids=position_ids, ", "", "packed rows have no positions of their own"),
        (
            "attention_mask=None, position_ids=position_ids",
            "attention_mask=torch.ones_like(token_ids_BT), position_ids=position_ids",
            "test_packing.py",
        ),
        ("if not torch.equal(first, second) or gap > tolerance:", "if gap > tolerance:", "test_packing.py"),
        ('vars(layer).pop("forward", None)', "pass", "test_checkpointing.py"),
        ("else around(layer)", "else nullcontext()", "test_checkpointing.py"),
    ],
    "agentrl/learner/model.py": [
        ("states_SH if self.config.critic_gradient else states_SH.detach()", "states_SH", "the head's gradient"),
        ("states_SH if self.config.critic_gradient else states_SH.detach()", "states_SH.detach()", "critic_gradient"),
        (
            "return ValueScores(value_S[:n], value_S[n:])",
            "return ValueScores(value_S[:n], value_S[:n])",
            "final states",
        ),
        ("    nn.init.zeros_(head.weight)", "    nn.init.ones_(head.weight)", "the head starts at 0"),
        ("    nn.init.zeros_(head.bias)", "    nn.init.ones_(head.bias)", "the head starts at 0"),
        (
            "copy.deepcopy(self.policy).requires_grad_(False)\n        elif",
            "self.policy\n        elif",
            "reference moves",
        ),
        ("self._adapters.copy(POLICY, CRITIC)", "pass", "the critic starts from the policy"),
        ("self._adapters.copy(POLICY, REFERENCE)", "pass", "the reference is the policy after SFT"),
        (
            "self.config.gradient_checkpointing and torch.is_grad_enabled()",
            "torch.is_grad_enabled() and False",
            "test_checkpointing.py",
        ),
        (
            "self.config.gradient_checkpointing and torch.is_grad_enabled()",
            "self.config.gradient_checkpointing",
            "test_checkpointing.py",
        ),
        (
            "            with torch.no_grad():\n                states_SH",
            "            with nullcontext():\n                states_SH",
            "test_critics.py",
        ),
    ],
    "agentrl/learner/adapters.py": [
        (
            "            weight.requires_grad_(False)",
            "            weight.requires_grad_(True)",
            "the reference is frozen",
        ),
        ("            _activate(POLICY, modules)", "            pass", "the policy is active again"),
        ("module.enable_adapters(False)", "module.enable_adapters(True)", "the base as reference"),
        ("found[-layers:]", "found[:layers]", "test_critics.py"),
        ("if layers > len(found):", "if False:", "test_critics.py"),
        ('if f".{POLICY}." in name or f".{CRITIC}." in name:', "if False:", "test_checkpointing.py"),
        ("module.enable_adapters(False)", "pass", "test_model.py"),
    ],
    "agentrl/learner/logits.py": [
        ("logits_NV.div_(temperature)", "logits_NV.mul_(temperature)", "temperature upside down"),
        (".squeeze(-1) - norm_N", ".squeeze(-1)", "logprobs are normalised"),
        ("dtype = torch.promote_types(hidden_NH.dtype, torch.float32)", "dtype = hidden_NH.dtype", "test_precision.py"),
        (".squeeze(-1) - norm_N[part]", ".squeeze(-1)", "logprobs are normalised"),
        ("entropy_N if entropy_grad else entropy_N.detach()", "entropy_N.detach()", "the bonus has a gradient"),
        ("pull_N1 = -grad_logprob_N", "pull_N1 = grad_logprob_N", "sign in the backward pass"),
        (
            "grad_logprob_N[part, None]).div_(ctx.temperature)",
            "grad_logprob_N[part, None])",
            "temperature in the backward pass",
        ),
        ("(log_pi_NV + entropy_N[part, None])", "log_pi_NV", "gradient of the entropy"),
        (
            "d_weight_VH.addmm_(d_logits_NV.T, hidden_NH[part])",
            "d_weight_VH = d_logits_NV.T @ hidden_NH[part]",
            "chunks add up",
        ),
        ("d_bias_V += d_logits_NV.sum(0)", "d_bias_V = d_logits_NV.sum(0)", "chunks add up"),
    ],
    "agentrl/learner/packing.py": [
        ("if lengths[index] <= room:", "if lengths[index] <= room + 1:", "a line overflows"),
        ("rooms[line] -= lengths[index]", "pass", "a line overflows"),
        ("(len(groups[-1]) + 1) * width <= budget", "len(groups[-1]) * width <= budget", "budget of a micro-batch"),
        ("rooms[line] -= lengths[index]", "rooms[line] -= 0", "test_packing.py"),
        ("key=lambda index: -lengths[index]", "key=lambda index: lengths[index]", "test_packing.py"),
    ],
    "agentrl/learner/sft.py": [
        ("aggregate(-logprob_N", "aggregate(logprob_N", "sign of the likelihood"),
        ("self._batches * size, (self._batches + 1)", "0, (0 + 1)", "SFT goes on to the next demonstrations"),
    ],
    "agentrl/types.py": [
        ("action += [False] * n_prompt + [True] * n_sampled", "action += [True] * (n_prompt + n_sampled)", "the mask"),
        ("reward[-1] = turn.reward", "reward[-n_sampled] = turn.reward", "where a reward lands (T2)"),
        ("        ids += self.trailing_ids\n", "", "V of the final state at CUT"),
    ],
    "agentrl/learner/optim.py": [
        ("return torch.nn.Parameter(weight.detach().float())", "return None", "test_optim.py"),
        ("weight.grad_dtype = torch.float32", "weight.grad_dtype = weight.dtype", "test_optim.py"),
        ("                master.copy_(stored)", "                pass", "test_optim.py"),
        (
            "master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype)))",
            "pass",
            "test_optim.py",
        ),
        (
            "master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype)))",
            "master.copy_(weight)",
            "test_optim.py",
        ),
        ("            self._round_masters()", "            pass", "test_optim.py"),
    ],
}
