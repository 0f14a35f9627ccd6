"""Mutation testing: puts one known fault at a time into a copy of the project, and asks whether the tests notice.

    python tests/mutate.py               # all faults; writes tests/mutations.jsonl, about 10 minutes on one core
    python tests/mutate.py 15 gae        # only faults of trick 15 and those with "gae" in their name; writes nothing
    python tests/mutate.py --list        # the faults and their tests

A fault is a line of FAULTS: a name, the number of the trap it falls into, the script and the function (or Class.method) it is in, the text
it replaces (exactly once in that function), the text it puts there, and the tests that should fail, as FILE::NAME for test_NAME in
tests/test_FILE.py. To add one, add a line. A fault is killed by a failed assertion, or by the error named in its last field, while a test
runs; a fault that does not compile, does not find its text, or fails in another way is broken. Exit code 1 if any survives or is broken.

The tests run in processes forked from this one (Linux, macOS), which has imported the libraries but none of the project.
"""

import ast
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
sys.dont_write_bytecode = True  # two faults of the same size in the same second would share a .pyc

import pytest  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 240  # seconds for the tests of one fault
S, D, R, M, F = "ppo_sentiment", "ppo_dialog", "rloo_tldr", "reward_model", "sft"


class Fault(NamedTuple):
    """A line of FAULTS."""

    name: str
    trick: int | None
    script: str
    function: str
    old: str
    new: str
    tests: str
    raises: str = ""


LIB = "against_libraries::"
FAULTS = [Fault(*row) for row in [
    # masks, tokens, positions
    ("the reward model is read where the text is not pad", 1, M, "sequence_logits", "mask.sum(-1) - 1", "(input_ids != 0).sum(-1) - 1",
     LIB + "sequence_logits_do_not_depend_on_padding"),
    ("pads keep ids that the embedding lacks", 2, S, "response_states", "torch.where(mask, input_ids, 0)", "input_ids",
     LIB + "a_padded_batch_scores_as_one_by_one[1.0-gpt2-ppo_sentiment]", "IndexError"),
    ("positions count pads", 3, R, "hidden_states", "(mask.long().cumsum(-1) - 1).clamp(min=0)[:, -L:]",
     "torch.arange(mask.shape[1], device=mask.device)[None, -L:].expand(len(mask), -1)",
     LIB + "generate_does_not_depend_on_the_batch[rloo_tldr]"),
    ("attention sees pads", 3, D, "hidden_states", "attention_mask=mask.long()", "attention_mask=torch.ones_like(mask).long()",
     LIB + "generate_does_not_depend_on_the_batch[ppo_dialog]"),
    ("packed rows see each other", None, R, "document_states", "(document[:, None, :] != document[:, :, None])",
     "(document[:, None, :] > document[:, :, None])", LIB + "packed_rows_are_the_padded_ones[gpt2-rloo_tldr]"),
    ("positions of packed rows count on", 3, D, "response_states", "(mask.cumsum(1) - 1)[mask]]",
     "torch.arange(int(mask.sum()))]", LIB + "packed_rows_are_the_padded_ones[llama-ppo_dialog]"),
    ("hidden states of packed rows one to the right", 6, S, "response_states", "[:, -T - 1 : -1]", "[:, -T:]",
     LIB + "packed_rows_are_the_padded_ones[gpt2-ppo_sentiment]"),
    ("rows are packed over a window", None, R, "can_pack", "min(windows) >= width and ", "",
     LIB + "when_rows_are_packed[rloo_tldr]"),
    ("mean over pads", 4, S, "masked_mean", "/ mask.sum()", "/ mask.numel()", "kernels::masked_mean_agrees_with_naive"),
    ("mask one too long", 4, R, "length_mask", "< lengths[:, None]", "<= lengths[:, None]", "kernels::length_mask_edges"),
    ("every token of the batch is valid", 4, D, "train", 'b_mask = length_mask(b["lengths"], T)',
     'b_mask = length_mask(b["lengths"] * 0 + T, T)', "mutants::nothing_behind_the_end_is_read[ppo_dialog]", "UserError"),
    ("entropy over pads", 4, S, "train", "(torch.where(m, x, 0.0) for x", "(x if x is entropies else torch.where(m, x, 0.0) for x",
     "mutants::nothing_behind_the_end_is_read[ppo_sentiment]"),
    ("value loss over pads", 4, D, "train", "(torch.where(m, x, 0.0) for x", "(x if x is values else torch.where(m, x, 0.0) for x",
     "mutants::nothing_behind_the_end_is_read[ppo_dialog]"),
    ("nan of a masked slot in the loss of rloo", 5, R, "train", "(torch.where(m, x, 0.0) for x", "(x * m for x",
     "mutants::nothing_behind_the_end_is_read[rloo_tldr]"),
    ("nan of a masked slot in a mean", 5, S, "masked_mean", "torch.where(mask, values, 0.0)", "(values * mask)",
     "kernels::masked_mean_agrees_with_naive kernels::masked_mean_lets_no_nan_into_gradients"),
    ("nan of a masked slot in gae", 5, D, "gae", "(torch.where(mask, x, 0.0).float() for x", "((x * mask).float() for x",
     "kernels::gae_agrees_with_a_backward_loop"),
    ("a ratio of e^89 is inf", 5, R, "clipped_policy_loss", ".clamp(max=80)", "", "kernels::clipped_policy_loss_of_extreme_ratios"),
    ("hidden states one to the right", 6, S, "response_states", "+ prompt - 1)", "+ prompt)", "kernels::three_tokens_by_hand"),
    ("the critic's values one to the right", 6, S, "PolicyAndValue.forward", "response_states(self.critic, input_ids, mask, T)",
     "response_states(self.critic, input_ids, mask, T).roll(-1, 1)",
     "mutants::a_value_is_said_before_its_token[own-ppo_sentiment]"),
    ("the label of sft at its own place", 6, F, "next_token_losses", "hidden[:, :-1][valid]",
     "hidden[:, 1:][valid]", "kernels::next_token_losses_agree_with_naive"),
    ("a length without its stop token", 6, S, "response_lengths", "torch.arange(1, T + 1", "torch.arange(0, T",
     "kernels::response_lengths"),
    ("the first space of a response is lost", 7, S, "rollout", "text[len(prompt):]", "text[len(prompt):].lstrip()",
     "runs::responses_keep_their_first_space"),
    ("utterances without their first space", 7, D, "utterance_ids", """f" {' '""", """f"{' '""",
     "dialog_runs::a_prompt_is_the_beginning_of_its_document"),
    ("the newest utterances are left out", 7, D, "context_ids", "kept = kept[1:]", "kept = kept[:-1]",
     "dialog_runs::a_prompt_is_the_end_of_a_dialogue"),
    ("no EOS in sft", 8, F, "documents", "t + [tokenizer.eos_token_id]", "t + []", LIB + "eos_is_learned_at_the_end_of_every_document"),
    ("EOS masked as if it were pad", 8, F, "collate_rows", "torch.tensor(targets)",
     "torch.tensor([-100 if t == tokens[-1] else t for t in targets])", LIB + "the_loss_of_packed_rows_is_the_loss_of_all_documents "
     "sft_reward_runs::loss_of_a_completion_alone"),
    ("the reward model reads the last column", 9, M, "sequence_logits", "mask.sum(-1) - 1]", "-1]",
     LIB + "sequence_logits_do_not_depend_on_padding"),
    ("truncation cuts EOS", 9, M, "preference_ids", "[-max_length:]", "[:max_length]", "preferences::what_is_too_long_loses_its_beginning"),
    ("truncation cuts the answer", 9, D, "load_classifier", 'truncation_side = "left"', 'truncation_side = "right"',
     "dialog_runs::intent_by_hand"),
    # sampling and scoring the same distribution
    ("old log-probabilities in bf16", 10, S, "rollout", "dict(logprobs=logprobs,", "dict(logprobs=logprobs.bfloat16().float(),",
     "runs::learning_rate_0_changes_nothing"),
    ("the ratio of rloo is of a mean token", 10, R, "train", "(new - old).sum(1)", "(new - old).mean(1)",
     "mutants::one_step_by_hand[rloo_tldr]"),
    ("no temperature in sampling", 11, S, "generate", ".div_(temperature)", "", "runs::the_sampled_distribution_is_the_scored_one"),
    ("no temperature in log-probabilities", 11, R, "token_logprobs", "hidden / temperature", "hidden",
     "kernels::token_logprobs_agree_with_naive"),
    ("no temperature in the reference", 11, S, "PolicyAndValue.reference_logprobs", "T, temperature)[0]", "T, 1.0)[0]",
     "runs::the_sampled_distribution_is_the_scored_one"),
    ("no temperature in the old log-probabilities", 11, D, "rollout_answers", "tokens.shape[1], args.temperature)",
     "tokens.shape[1], 1.0)", "dialog_runs::the_sampled_distribution_is_the_scored_one"),
    ("top-k in rollouts", 12, R, "generate_groups", ".float().softmax(-1)  #", ".float().softmax(-1)\n        "
     "probs = probs.masked_fill(probs < probs.topk(50).values[:, -1:], 0.0)  #",
     LIB + "generate_samples_from_transformers_softmax[1.0-gpt2-rloo_tldr]"),
    ("probabilities of a bf16 model in bf16", 12, S, "generate", "logits.float().softmax(-1)", "logits.softmax(-1).float()",
     LIB + "generate_of_a_bf16_model_sums_in_fp32[ppo_sentiment]"),
    ("the sampler's log-probabilities unchecked", 10, R, "train", "< 1e-3:", "< 1e3:",
     "rloo_runs::old_logprobs_of_the_sampler_are_checked"),
    ("the sampler's log-probabilities a token late", 10, R, "generate_groups", "logprobs[rows, t] = token",
     "logprobs[rows, t - 1] = token",
     "rloo_runs::old_logprobs_of_the_sampler_make_the_same_step[plain]"),
    ("the flag for the sampler's log-probabilities changes nothing", 10, R, "rollout_groups", 'args.old_logprobs == "forward"', "True",
     "rloo_runs::old_logprobs_of_the_sampler_make_the_same_step[plain]"),
    ("one uniform for all tokens", 12, D, "generate_until", "uniforms[rows, t]", "uniforms[rows, 0]",
     "stop_sequences::generation_until_eos_is_that_of_ppo_sentiment"),
    ("dropout stays on", 13, S, "load_model", "config.update(rates | gelu", "config.update(gelu",
     LIB + "two_forwards_in_train_mode_are_equal[gpt2-ppo_sentiment]"),
    ("dropout in LoRA", 13, R, "add_lora", "lora_alpha=args.lora_alpha,", "lora_alpha=args.lora_alpha, lora_dropout=0.1,",
     "mutants::lora_has_no_dropout[rloo_tldr]"),
    ("the reference keeps the adapter on", 14, S, "PolicyAndValue.reference_logprobs",
     "self.policy.disable_adapter() if self.reference is None else nullcontext()", "nullcontext()",
     LIB + "the_adapter_turned_off_is_the_base[gpt2-ppo_sentiment]"),
    ("the reference of an adapter is its base", 14, D, "load_model", "peft.PeftModel.from_pretrained(base, name).merge_and_unload()",
     "base", LIB + "the_reference_of_an_adapter_is_the_adapter[0-ppo_dialog]"),
    ("a merged adapter stays frozen", 14, F, "load_model", ".requires_grad_(True)", "", LIB + "a_merged_adapter_is_trainable[sft]"),
    # rewards
    ("the score at every token", 15, S, "token_rewards", "rewards.scatter_add(1, lengths[:, None] - 1, scores[:, None].to(rewards.dtype))",
     "rewards + scores[:, None]", "kernels::token_rewards_by_hand"),
    ("the score behind the last token", 15, D, "token_rewards", "lengths[:, None] - 1", "lengths[:, None].clamp(max=kl.shape[1] - 1)",
     "kernels::the_score_falls_on_the_last_valid_token"),
    ("KL is paid, not charged", 15, S, "token_rewards", "-kl_coef * kl, 0.0", "kl_coef * kl, 0.0", "kernels::token_rewards_by_hand"),
    ("only EOS counts as a stop", 16, S, "rollout", "== stop_token_id", "== tokenizer.eos_token_id", "runs::custom_stop_token"),
    ("the EOS penalty replaces the score", 17, R, "train", "scores - (args.missing_eos_penalty or 0.0))",
     "-(args.missing_eos_penalty or 0.0))", "rloo_runs::missing_eos_penalty"),
    ("the EOS penalty hits those who stopped", 17, D, "train", 'torch.where(b["stopped"], scores, ', 'torch.where(~b["stopped"], scores, ',
     "dialog_runs::rewards_by_hand[k1]"),
    ("the EOS penalty before the clip", 18, S, "train", "  # TRL's EOS trick",
     "\n        scores = scores if args.score_clip is None else scores.clamp(-args.score_clip, args.score_clip)",
     "runs::score_clip_comes_before_the_penalty"),
    ("the logged KL is always k1", 19, S, "train", "kl.sum(1).mean(), time",
     'torch.where(b_mask, b["logprobs"] - b["ref_logprobs"], 0.0).sum(1).mean(), time',
     "runs::logged_kl_is_the_kl_of_the_reward"),
    ("whitening with the unbiased variance", 20, S, "masked_whiten", ".sum()) / count  # two", ".sum()) / (count - 1)  # two",
     "kernels::masked_whiten_by_hand kernels::masked_whiten_agrees_with_naive"),
    ("whitening loses the mean of rewards", 20, D, "masked_whiten", "white if shift_mean else white + mean", "white",
     "kernels::masked_whiten_by_hand kernels::masked_whiten_agrees_with_naive"),
    ("whitened rewards lose their mean in the run", 20, S, "train", "b_mask, shift_mean=False)", "b_mask)", "runs::whiten_rewards"),
    ("whitening counts pads", 20, S, "masked_whiten", "total(mask.sum().float())", "total(torch.tensor(float(mask.numel())))",
     "kernels::masked_whiten_agrees_with_naive"),
    ("whitening by process", 20, S, "masked_whiten", "if dist.is_available() and dist.is_initialized() else t", "if False else t",
     "kernels::masked_whiten_of_two_processes_is_that_of_one"),
    ("whitening of one token", 20, D, "masked_whiten", "if count < 2", "if count < 1", "kernels::masked_whiten_edges"),
    ("advantages are not whitened", 20, D, "train", "advantages = masked_whiten(advantages, b_mask)", "pass",
     "mutants::one_step_by_hand[ppo_dialog]"),
    ("the coefficient follows the KL of one process", 21, S, "train", 'adaptive_kl_coef(kl_coef, metrics["objective/kl"]',
     "adaptive_kl_coef(kl_coef, kl[rank * B // world : (rank + 1) * B // world].sum(1).mean().item()",
     "mutants::two_processes_have_one_kl_coefficient"),
    ("the adaptive coefficient is not clipped", 21, S, "adaptive_kl_coef", "min(max(kl / target - 1, -0.2), 0.2)", "kl / target - 1",
     "kernels::adaptive_kl_coef_by_hand"),
    ("the adaptive coefficient goes the other way", 21, D, "adaptive_kl_coef", "1 + error", "1 - error",
     "kernels::adaptive_kl_coef_by_hand"),
    ("sentiment by place, not by label", 22, S, "opinion_of", "return logits[:, numbers", "return logits.sort(-1).values[:, numbers",
     "runs::reward_label"),
    ("the reward model gets the policy's tokenizer", 23, S, "load_classifier", "load_tokenizer(name)",
     'load_tokenizer("checkpoints/reviews-lm")', "runs::reward_model_with_another_tokenizer", "IndexError"),
    ("a shared prompt's keys go to the wrong responses", None, M, "shared_prompt_scores", "cache.batch_repeat_interleave(K)",
     "cache.batch_select_indices(torch.arange(len(mask) // K).repeat(K))", LIB + "a_prompt_that_is_read_once_changes_nothing[gpt2]"),
    ("a shared prompt is longer than what is alike", None, M, "shared_prompt_scores", ".cumprod(0).sum()", ".sum()",
     LIB + "only_a_common_beginning_is_shared"),
    ("no gradient through a shared prompt", None, M, "shared_prompt_scores", "inner.base_model(input_ids=tokens[::K, :P], ",
     "torch.no_grad()(inner.base_model.forward)(input_ids=tokens[::K, :P], ", LIB + "a_prompt_that_is_read_once_changes_nothing[gpt2]"),
    ("shared prompts get each other's responses", 25, R, "group_states", "torch.arange(len(last), device=ids.device).repeat(k)",
     "torch.arange(len(last), device=ids.device).repeat_interleave(k)", LIB + "prompts_read_once_give_the_same_states[gpt2]"),
    ("a shared prompt's last state for its first response alone", 25, R, "group_states", "last.repeat(k, 1, 1)",
     "F.pad(last, (0, 0, 0, 0, 0, len(rest) - len(last)))", LIB + "prompts_read_once_give_the_same_states[gpt2]"),
    ("passes of shared prompts ordered prompt by prompt", 25, R, "passes", "part.T.flatten()", "part.flatten()",
     "rloo_runs::share_prompts_is_another_way_to_the_same_step rloo_runs::share_prompts_keeps_groups_together"),
    ("the reward offset is not subtracted", 24, R, "load_scorer", ".squeeze(-1) - offset", ".squeeze(-1)",
     "rloo_runs::score_is_transformers_own"),
    ("the reward offset has the wrong sign", 24, M, "train", 'numbers["reward_offset"] = sum', 'numbers["reward_offset"] = -sum',
     "preferences::references_score_0"),
    # advantages and losses
    ("groups read prompt by prompt", 25, R, "rloo_advantages", "view(rloo_k, -1)", "view(-1, rloo_k).T",
     "kernels::rloo_advantages_of_trls_page"),
    ("a leave-one-out divided by its deviation", 26, R, "rloo_advantages", "(rloo_k - 1)).flatten()",
     "(rloo_k - 1)).div(rewards.std(0) + 1e-8).flatten()", "kernels::rloo_advantages_edges"),
    ("a leave-one-out that includes itself", 25, R, "rloo_advantages", "(rewards.sum(0) - rewards) / (rloo_k - 1)", "rewards.mean(0)",
     "kernels::rloo_advantages_of_trls_page"),
    ("num_mini_batches is ignored", 27, R, "train", "view(epochs * args.num_mini_batches, -1)", "view(epochs, -1)",
     "rloo_runs::number_of_steps"),
    ("sum of micro-batch means in ppo", 28, S, "train", ".sum() / mb_tokens\n", ".sum() / m.sum() / len(micros)\n",
     "runs::gradient_does_not_depend_on_micro_batches"),
    ("sum of micro-batch means in rloo", 28, R, "train", "policy_loss.sum() / M", "policy_loss.mean()",
     "rloo_runs::gradient_does_not_depend_on_micro_batches"),
    ("sum of micro-batch means in sft", 28, F, "train", "losses.sum() / tokens * world",
     "losses.sum() / (labels != -100).sum() / len(micros)",
     "sft_reward_runs::sft_gradient_does_not_depend_on_micro_batches"),
    ("the loss of ppo is not divided", 28, D, "train", ".sum() / mb_tokens\n", ".sum()\n", "mutants::one_step_by_hand[ppo_dialog]"),
    ("the loss of the reward model is not divided", 28, M, "train", "losses.sum() / B * world", "losses.sum() * world",
     "mutants::a_larger_batch_of_equal_rows_has_the_same_gradient[reward_model]"),
    ("approxkl without its half", None, D, "train", "0.5 * (new - old) ** 2", "(new - old) ** 2",
     "mutants::metrics_of_an_update_by_hand[ppo_dialog]"),
    ("ratio_var keeps the square of the mean", None, R, "train", "off2 - off**2", "off2",
     "mutants::metrics_of_an_update_by_hand[rloo_tldr]"),
    ("every value outside the range counts as clipped", None, S, "train",
     "far & (value_loss > 0.5 * (values - returns[rows]) ** 2)", "far", "mutants::metrics_of_an_update_by_hand[ppo_sentiment]"),
    ("the loss of sft is not divided", 28, F, "train", "losses.sum() / tokens * world", "losses.sum() * world",
     "mutants::a_larger_batch_of_equal_rows_has_the_same_gradient[sft]"),
    ("the gradient is not scaled by the processes", 28, S, "train", "accelerator.backward(loss * world)", "accelerator.backward(loss)",
     "processes::ppo_on_two_processes"),
    ("gradients are never zeroed", 29, R, "train", "optimizer.zero_grad()", "pass", "resume::sigterm_then_resume[rloo_tldr]"),
    ("a value behind the end", 30, S, "gae", "(torch.where(mask, x, 0.0).float() for x in (rewards, values))",
     "torch.where(mask, rewards, 0.0).float(), values.float()", "kernels::gae_agrees_with_a_backward_loop"),
    ("gamma and lambda swapped", 30, S, "gae", "gamma * F.pad(", "lam * F.pad(", "kernels::gae_agrees_with_a_backward_loop"),
    ("gae backwards in time", 30, D, "gae", "powers.T", "powers", "kernels::gae_by_hand"),
    ("returns without values", 30, S, "gae", "advantages + values, 0.0", "advantages, 0.0", "kernels::gae_by_hand"),
    ("adam_eps does not reach the optimizer", 31, S, "make_optimizer", "eps=args.adam_eps", "eps=1e-8", "runs::adam_eps_reaches_adam"),
    ("k1 with the wrong sign", 32, D, "kl_per_token", "logprobs - ref_logprobs", "ref_logprobs - logprobs",
     "kernels::kl_per_token_agrees_with_naive"),
    ("k2 without its half", 32, S, "kl_per_token", "0.5 * log_ratio**2", "log_ratio**2", "kernels::kl_per_token_agrees_with_naive"),
    ("k3 with the wrong sign", 32, R, "kl_per_token", "torch.expm1(-log_ratio) + log_ratio", "torch.expm1(log_ratio) - log_ratio",
     "kernels::kl_per_token_agrees_with_naive"),
    ("k1 as a loss is let through", 32, R, "train", 'if args.kl_in_loss and args.kl_estimator == "k1"', "if False",
     "bad_input::bad_input[rloo_tldr-kl-in-loss]"),
    ("the policy loss takes the better of two", None, S, "clipped_policy_loss", "torch.max(", "torch.min(",
     "kernels::clipped_policy_loss_agrees_with_naive"),
    ("the ratio upside down", None, D, "clipped_policy_loss", "(logprobs - old_logprobs)", "(old_logprobs - logprobs)",
     "kernels::clipped_policy_loss_agrees_with_naive"),
    ("the value loss without its half", None, S, "clipped_value_loss", "0.5 * ", "", "kernels::clipped_value_loss_by_hand"),
    ("the value loss is not clipped", None, D, "clipped_value_loss", "torch.max((values - returns) ** 2, (clipped - returns) ** 2)",
     "(values - returns) ** 2", "kernels::clipped_value_loss_by_hand"),
    ("a margin that is added", None, M, "preference_loss", "- margin", "+ margin", "kernels::preference_loss_agrees_with_naive"),
    ("chosen and rejected swapped", None, M, "preference_loss", "(chosen - rejected)", "(rejected - chosen)",
     "kernels::preference_loss_agrees_with_naive"),
    ("a ranking that counts missing responses", None, M, "ranking_loss", "torch.where(both, losses, 0.0)", "losses",
     "kernels::ranking_loss_agrees_with_naive"),
    # sft
    ("sft learns prompts", None, F, "documents", "[-100] * len(p) if args.completion_only_loss else p", "p",
     LIB + "labels_stand_on_completions_alone"),
    ("packed documents see each other", None, F, "document_states", "(document[:, None, :] != document[:, :, None])",
     "(document[:, None, :] < 0)", LIB + "packed_documents_do_not_see_each_other[gpt2]"),
    ("packed positions go on", None, F, "collate_rows", "torch.arange(len(tokens))", "torch.arange(at, at + len(tokens))",
     LIB + "packed_documents_do_not_see_each_other[gpt2]"),
    ("a document is learned from the one before", None, F, "collate_rows", "labels[i, at] = -100", "pass",
     LIB + "the_loss_of_packed_rows_is_the_loss_of_all_documents"),
    # runs
    ("prompts and uniforms drawn by process", 33, S, "train", "B, args.seed), args, update)", "B, args.seed), args, update, rank)",
     "processes::ppo_on_two_processes"),
    ("the order of minibatches drawn by process", 33, S, "train", '"order", update, epoch', '"order", update, epoch, rank',
     "processes::ppo_on_two_processes"),
    ("all updates draw the same", 33, F, "draws", "(seed, *place)))", "(seed, *place[:1])))", "kernels::draws_depend_on_the_place_alone"),
    ("resume without RNG", 34, S, "Run.restore", 'torch.set_rng_state(state["rng"]["torch"])', "pass", "resume::random_state_of_user_code"),
    ("resume without optimizer", 34, D, "Run.restore", 'optimizer.load_state_dict(state["optimizer"])', "pass",
     "resume::sigterm_then_resume[ppo_dialog]"),
    ("resume without scheduler", 34, F, "Run.restore",
     'scheduler.load_state_dict(state["scheduler"] | {"last_epoch": state["update"] - 1})', "pass", "resume::sigterm_then_resume[sft]"),
    ("resume without KL coefficient", 34, S, "train", '{"kl_coef": args.kl_coef} | run.restore(parameters, optimizer, scheduler)',
     'run.restore(parameters, optimizer, scheduler) | {"kl_coef": args.kl_coef}', "resume::sigterm_then_resume[ppo_sentiment]"),
    ("resume at the beginning of the data", 34, M, "train", "(update - 1) * B, B", '(update - 1 - state["update"]) * B, B',
     "resume::sigterm_then_resume[reward_model]"),
    ("resume without the value head", 34, D, "Run.restore", "in parameters.items()", "in list(parameters.items())[:-2]",
     "resume::sigterm_then_resume[ppo_dialog]"),
    ("a saved value head is not loaded", 35, S, "build_policy", "model.value_head.load_state_dict(load_file(head))", "pass",
     "runs::value_head_survives_saving"),
    ("a saved score head is drawn again", 35, M, "new_head", "new = not known or config.num_labels != model.config.num_labels",
     "new = True", "preferences::a_new_head_has_the_documented_spread"),
    ("kl_estimator is not used", 36, D, "train", "args.kl_estimator)", '"k1")', "dialog_runs::rewards_by_hand[k2]"),
    ("vf_coef is not used", 36, S, "train", "args.vf_coef * value_loss", "value_loss", "mutants::one_step_by_hand[ppo_sentiment]"),
    ("warm-up is not used", 36, S, "make_optimizer", "return step / warmup", "return 1.0", "runs::schedules[linear-4]"),
    ("cliprange is not used", 36, D, "train", "args.cliprange)", "0.2)", "mutants::clip_ranges_reach_the_losses[ppo_dialog]"),
    ("gamma and lambda swapped in the run", 36, D, "train", "args.gamma, args.lam", "args.lam, args.gamma",
     "dialog_runs::rewards_by_hand[k1]"),
    ("METEOR's weight is not used", 39, D, "rollout_answers", "meteor=args.meteor_weight", "meteor=1.0",
     "dialog_runs::scores_are_the_weighted_sum_of_the_parts"),
    ("METEOR of the answer as reference", 39, D, "load_reward_parts", "meteor(turn.reference, answer)", "meteor(answer, turn.reference)",
     "mutants::the_meteor_of_a_run_is_of_the_reference"),
    ("acts that begin at 0 in ppo_dialog", 38, D, "load_reward_parts", "turn.act - 1 for", "turn.act % probs.shape[1] for",
     "dialog_runs::intent_by_hand"),
    ("acts that begin at 0 in the classifier", 38, M, "act_rows", "(*pair, act - 1)", "(*pair, act)", "sft_reward_runs::turns_and_acts"),
    ("a tie is a win", 40, R, "load_judge", "((ours > theirs).float() + (ours >= theirs).float()) / 2", "(ours >= theirs).float()",
     "rloo_runs::win_rate_by_a_function"),
    ("a chat judge that prefers a place", 40, R, "chat_judge", 'float(("A" in letters) == first)', 'float("A" in letters)',
     "rloo_runs::chat_judge_reads_verdicts"),
    ("one process in place of two", 41, S, "start", "if runs != int(asked)", "if False",
     "processes::one_process_in_place_of_two_is_refused"),
    ("the update goes around the wrapped module", 42, S, "train", "new, entropies, values = model(", "new, entropies, values = bare(",
     "processes::ppo_on_two_processes"),
    ("the shards' weights do not come back", 42, S, "train", "        take_weights(bare, learner)\n        with", "        with",
     "processes::shards[fsdp2-ppo_sentiment]"),
    ("any head is taken for a matrix product", 43, D, "check_head", "if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3)", "if False",
     LIB + "a_head_that_does_more_is_refused[gemma2-ppo_dialog]"),
    ("the bias of the head is forgotten", 43, S, "token_logprobs", "None if bias is None else bias / temperature", "None",
     "kernels::token_logprobs_agree_with_naive"),
    ("the KL target is a mean per token", 44, D, "train", 'adaptive_kl_coef(kl_coef, metrics["objective/kl"]',
     'adaptive_kl_coef(kl_coef, metrics["objective/kl"] / metrics["completions/mean_length"]',
     "mutants::the_coefficient_follows_the_logged_kl[ppo_dialog]"),
    ("the KL of rloo is a mean per token", 44, R, "train", "0.0).sum(1)  # [B]", "0.0).mean(1)  # [B]", "rloo_runs::rewards_by_hand[k1]"),
    # blocks of logits
    ("the gradient forgets that a block is not the whole vocabulary", None, R, "BlockwiseLogprobs.backward", " * scale[k, rows]", "",
     "kernels::token_logprobs_gradients_agree_with_autograd"),
    ("the gradient of the head is that of the last rows", None, D, "BlockwiseLogprobs.backward", "d_weight[columns] + part", "part",
     "kernels::token_logprobs_gradients_agree_with_autograd"),
    ("kept blocks come back in another order", None, S, "BlockwiseLogprobs.blocks", "iter(kept)", "iter(kept[::-1])",
     "kernels::kept_probabilities_change_no_bit", "RuntimeError"),
    ("all probabilities are kept", None, R, "BlockwiseLogprobs.forward", "[exps] if keep >= 0 else []", "[exps]",
     "kernels::kept_probabilities_change_no_bit"),
    ("what fills up the last sixteen has a gradient", None, S, "BlockwiseLogprobs.backward", "(0, len(hidden) - len(grad)))",
     "(0, len(hidden) - len(grad)), value=1.0)", "kernels::token_logprobs_in_bf16_of_any_number"),
    ("rows of 128 tokens attend in bf16", None, R, "attention", "query.shape[2] > 1", "1 < query.shape[2] < 128",
     LIB + "attention_in_bf16_is_in_fp32_over_rows"),
    ("transformers' attention stays", None, S, "train", 'transformers.AttentionInterface.register("sdpa", attention)', "None",
     "runs::bf16"),
    ("freed memory goes back to Linux", None, S, "start", "hold_memory()", "None", "faults::what_is_freed_is_kept"),
    ("the longest row is cut", None, S, "response_states", "int(mask.sum(1).max())", "int(mask.sum(1).min())",
     LIB + "a_padded_batch_scores_as_one_by_one[1.0-gpt2-ppo_sentiment]"),
    # stop sequences
    ("the automaton of stops has no fallback", None, D, "stop_sequence_table",
     "next(k for k in range(n, -1, -1) if text.endswith(stop[:k]))", "(len(text) if stop.startswith(text) else 0)",
     "stop_sequences::stop_sequence_table_by_hand stop_sequences::stop_sequences_agree_with_naive"),
    ("a complete stop sequence is forgotten", None, D, "stop_sequence_table", "torch.full((n + 1, len(pieces)), n)",
     "torch.full((n + 1, len(pieces)), 0)", "stop_sequences::stop_sequences_agree_with_naive"),
]]


parsed = functools.cache(ast.parse)


def place(source, path):
    """Where a function or Class.method stands in a source. -> start, end"""
    nodes = parsed(source).body
    for name in path.split("."):
        found = [node for node in nodes if getattr(node, "name", None) == name]
        if len(found) != 1:
            raise ValueError(f"{path} is there {len(found)} times")
        nodes = found[0].body
    lines = source.splitlines(True)
    return sum(map(len, lines[: found[0].lineno - 1])), sum(map(len, lines[: found[0].end_lineno]))


def with_fault(source, fault):
    """The source of a script with a fault in it."""
    start, end = place(source, fault.function)
    if (times := source[start:end].count(fault.old)) != 1:
        raise ValueError(f"its text is {times} times in {fault.function}")
    compile(changed := source[:start] + source[start:end].replace(fault.old, fault.new) + source[end:], fault.script, "exec")
    return changed


def kinds(error):
    """Names of the classes of an exception, or of all in a group."""
    return sorted({k for e in error.exceptions for k in kinds(e)}) if isinstance(error, BaseExceptionGroup) else [type(error).__name__]


class Recorder:
    """A pytest plugin that keeps what failed: (test, when, kinds of the exception)."""

    def __init__(self):
        self.failed = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed:
            self.failed.append((item.nodeid, call.when, kinds(call.excinfo.value)))
        return report

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append((report.nodeid, "collect", [str(report.longrepr).strip().split("\n")[-1]]))


def in_child(folder, tests, flags):
    """What a forked process does: run tests of the copy, write what failed, and end."""
    os.setsid()
    os.chdir(folder)
    out = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests")]
    recorder, code = Recorder(), 3
    try:
        code = pytest.main([*tests, *flags, "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp"], plugins=[recorder])
    finally:
        (folder / "result.json").write_text(json.dumps([int(code), recorder.failed]))
        sys.stdout.flush()
        os._exit(0)


def run_tests(folder, names, flags=(), limit=LIMIT):
    """Run tests in a fork. -> exit code of pytest (-1: out of time), what failed, seconds"""
    tests, began = [f"tests/test_{file}.py::test_{name}" for file, name in (name.split("::") for name in names)], time.time()
    (folder / "result.json").unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        in_child(folder, tests, flags)
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.05)
        if time.time() - began > limit:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else (-1, [])
    return *result, round(time.time() - began, 1)


def judge(folder, fault):
    """Put a fault into the copy, run its tests, take it out. -> a line of mutations.jsonl"""
    path, line = folder / f"{fault.script}.py", dict(fault=fault.name, trick=fault.trick, script=fault.script, function=fault.function)
    source = path.read_text()
    try:
        path.write_text(with_fault(source, fault))
        code, failed, seconds = run_tests(folder, fault.tests.split(), ["-x"])
    except (ValueError, SyntaxError) as error:
        return line | dict(killed_by=None, seconds=0.0, broken=str(error))
    finally:
        path.write_text(source)
    if code == 0:
        return line | dict(killed_by=None, seconds=seconds)
    test, when, errors = failed[0] if failed else ("", f"pytest ended with code {code}", [])
    if code == 1 and when == "call" and set(errors) <= {"AssertionError", "Failed", fault.raises}:  # Failed: "did not raise"
        return line | dict(killed_by=test, seconds=seconds)
    return line | dict(killed_by=None, seconds=seconds, broken=f"{test} {when} {' '.join(errors)}")


def main(words):
    """Run the faults that the words choose. -> exit code"""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, markup=False)
    chosen = [f for f in FAULTS if not words or any(w == str(f.trick) or (not w.isdigit() and w.lower() in f.name.lower()) for w in words)]
    if words == ["--list"]:
        for fault in FAULTS:
            console.print(f"{fault.trick or '-':>2}  {fault.script:14} {fault.name}: {fault.tests}", soft_wrap=True)
        return 0
    if not chosen:
        console.print(f"no fault has {' or '.join(words)} as its trick or in its name")
        return 1
    import accelerate, datasets, hypothesis, peft, torch, transformers, tyro  # noqa: E401, F401, I001  once, for all forks
    hypothesis.settings.register_profile("mutate", database=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
    hypothesis.settings.load_profile("mutate")  # no shrinking: one failing example is enough
    out, began = ROOT / "tests/mutations.jsonl" if not words else None, time.time()
    with tempfile.TemporaryDirectory() as top:
        away = shutil.ignore_patterns(".*", "runs", "benchmarks", "__pycache__", "wandb")
        folder = Path(shutil.copytree(ROOT, Path(top).resolve() / "copy", ignore=away))
        tests = list(dict.fromkeys(name for fault in chosen for name in fault.tests.split()))
        code, failed, seconds = run_tests(folder, tests, limit=10 * LIMIT)
        console.print(f"without a fault: {len(tests)} tests, {len(failed)} failed, {seconds} s")
        if code != 0:
            console.print((folder / "log.txt").read_text()[-3000:])
            return 1
        lines = []
        if out:
            out.write_text("")
        for fault in chosen:
            lines.append(line := judge(folder, fault))
            console.print(f"{len(lines):3}/{len(chosen)}  {line['seconds']:5.1f} s  {fault.name}: "
                          f"{line.get('broken') or line['killed_by'] or 'SURVIVED'}", soft_wrap=True)
            if out:
                with open(out, "a") as file:
                    file.write(json.dumps(line) + "\n")
    table = Table(title="faults", title_justify="left")
    for column in ("fault", "trick", "script", "killed by"):
        table.add_column(column, overflow="fold")
    for x in lines:
        end = (x["killed_by"] or "").removeprefix("tests/") or ("BROKEN " + x["broken"] if "broken" in x else "SURVIVED")
        table.add_row(x["fault"], str(x["trick"] or ""), x["script"], end)
    console.print(table, soft_wrap=False)
    killed, broken = sum(bool(x["killed_by"]) for x in lines), sum("broken" in x for x in lines)
    console.print(f"{len(lines)} faults, {killed} killed, {len(lines) - killed - broken} survived" + f", {broken} broken" * (broken > 0)
                  + f", {time.time() - began:.0f} s")
    return int(killed < len(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
