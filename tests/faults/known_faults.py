"""The known faults that mutate.py puts into the scripts, one at a time.

A fault is written like this:

script.function: the name of the fault (trap 4, IndexError)
  FILE::TEST
  - the text that is replaced: it is in the function exactly once
  + the text in its place

The function may be a Class.method. FILE is relative to tests/. In parentheses, both may be missing: the
fault's number in docs/implementation_details.md, and an error in which the test may end, other than a failed
assertion. A text may have several lines. A line that begins with # is the headline of a section.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault, and the test that must notice it."""

    name: str
    script: str
    function: str
    old: str
    new: str
    test: str
    trap: int | None
    raises: str


def read(block):
    """A fault from its lines."""
    headline, test, *changes = block.split("\n")
    place, name, trap, error = re.fullmatch(
        r"(\S+): (.+?)(?: \((?:trap (\d+))?(?:, )?(\w+)?\))?", headline
    ).groups()
    script, _, function = place.partition(".")
    old, new = ("\n".join(line[4:] for line in changes if line.startswith(mark)) for mark in ("  -", "  +"))
    trap = None if trap is None else int(trap)
    return Fault(name, script, function, old, new, test.strip(), trap, error or "")


TABLE = r"""
# Masks, padding, positions

reward_model.sequence_logits: the reward model is read where the text is not pad (trap 1)
  math/test_classifiers.py::test_sequence_logits_do_not_depend_on_padding[own-gpt2]
  - mask.sum(1) - 1
  + (ids != 0).sum(1) - 1
ppo_sentiment.hidden_states: positions count pads (trap 3)
  math/test_log_probabilities.py::test_a_padded_batch_scores_as_one_by_one[1.0-gpt2]
  - mask.long().cumsum(1) - 1
  + torch.arange(mask.shape[1]).expand(mask.shape)
ppo_sentiment.hidden_states: attention sees pads (trap 3)
  math/test_generation.py::test_generate_does_not_depend_on_the_batch
  - attention_mask=mask.long()
  + attention_mask=torch.ones_like(mask).long()
ppo_sentiment.masked_mean: a mean over pads (trap 4)
  math/test_math.py::test_masked_mean_agrees_with_naive
  - / mask.sum()
  + / mask.numel()
ppo_dialog.generate: every token of the batch is valid (trap 4)
  math/test_stop_sequences.py::test_generation_until_a_mark
  - lengths[rows[has_ended]] = t + 1
  + lengths[rows[has_ended]] = T
ppo_sentiment.gae: nan of a masked position in gae (trap 5)
  math/test_math.py::test_gae_agrees_with_naive
  - torch.where(mask, rewards, 0.0).float()
  + (rewards * mask).float()
ppo_sentiment.clipped_policy_loss: a ratio of e^89 is infinite (trap 5)
  math/test_math.py::test_clipped_policy_loss_of_extreme_ratios
  - log_ratio.clamp(max=40)
  + log_ratio
ppo_sentiment.response_logprobs: hidden states one to the right (trap 6)
  math/test_math.py::test_three_tokens_by_hand
  - -T - 1 : -1
  + -T:
ppo_sentiment.PolicyAndValue.forward: values of the critic one to the right (trap 6)
  math/test_log_probabilities.py::test_values_are_in_fp32_under_autocast[llama]
  - [:, -T - 1 : -1]
  + [:, -T:]
sft.LanguageModel.forward: the label of sft at its own position (trap 6)
  math/test_fine_tuning.py::test_losses_are_transformers_own
  - hidden, labels = hidden[:, :-1]
  + hidden, labels = hidden[:, 1:]
ppo_sentiment.response_lengths: a length without its stop token (trap 6)
  math/test_math.py::test_response_lengths
  - torch.arange(1, T + 1
  + torch.arange(0, T
ppo_sentiment.PolicyAndValue.forward: a critic of its own sees pads (trap 3)
  math/test_log_probabilities.py::test_values_are_in_fp32_under_autocast
  - hidden_states(self.critic, ids, mask)
  + hidden_states(self.critic, ids, torch.ones_like(mask))

# Texts, tokens, EOS

ppo_sentiment.decode: the first space of a response is lost (trap 7)
  runs/test_ppo_sentiment.py::test_responses_keep_their_first_space
  - text[start:]
  + text[start:].lstrip()
ppo_dialog.utterance_ids: utterances without their first space (trap 7)
  runs/test_ppo_dialog.py::test_a_prompt_is_the_beginning_of_its_document
  - f" {' '
  + f"{' '
ppo_dialog.context_ids: the newest utterances are left out (trap 7)
  runs/test_ppo_dialog.py::test_a_prompt_is_the_end_of_a_dialog
  - kept = kept[1:]
  + kept = kept[:-1]
sft.with_eos: no EOS in sft (trap 8)
  math/test_fine_tuning.py::test_eos_is_learned_at_the_end_of_every_document[own]
  - [*ids, tokenizer.eos_token_id]
  + ids
sft.with_eos: a second EOS
  faults/test_public_reports.py::test_a_text_that_ends_with_eos
  - ids[-1:] == [tokenizer.eos_token_id]
  + False
sft.collate_rows: EOS masked as if it were pad (trap 8)
  math/test_fine_tuning.py::test_eos_is_learned_at_the_end_of_every_document[eos]
  - torch.tensor(document_labels)
  + torch.tensor([-100 if label == document_labels[-1] else label for label in document_labels])
reward_model.sequence_logits: the reward model reads the last column (trap 9)
  math/test_classifiers.py::test_sequence_logits_do_not_depend_on_padding[own-gpt2]
  - mask.sum(1) - 1
  + mask.shape[1] - 1
reward_model.shared_prompt_logits: texts see the pads of their prompt
  math/test_classifiers.py::test_a_prompt_that_is_read_once[gpt2]
  - prefix_mask[row_of_text]
  + torch.ones_like(prefix_mask[row_of_text])
reward_model.collate_texts: the prompt is the whole shorter text (IndexError)
  math/test_classifiers.py::test_a_prompt_that_is_read_once[gpt2]
  - [ids[:-1] for ids in row.texts]
  + row.texts
ppo_sentiment.load_splits: backups of a file are read too (UserError)
  faults/test_public_reports.py::test_values_stay_as_they_are
  - re.fullmatch(
  + re.match(
reward_model.preference_ids: truncation cuts EOS (trap 9)
  runs/test_reward_model.py::test_a_prompt_is_cut_once_per_row
  - ids[:start] + ids[start + cut :]
  + ids[: len(ids) - cut]
ppo_dialog.load_classifier: truncation cuts the answer (trap 9)
  runs/test_ppo_dialog.py::test_intent_by_hand[own]
  - truncation_side = "left"
  + truncation_side = "right"
ppo_sentiment.rollout: only EOS counts as a stop (trap 16)
  runs/test_evaluation_ppo.py::test_responses_come_from_the_policy_of_their_time[reviews_run]
  - is_stop = torch.isin(tokens, stop_ids) & valid
  + is_stop = (tokens == tokenizer.eos_token_id) & valid
ppo_sentiment.rollout: limits of responses are ignored
  runs/test_ppo_sentiment.py::test_rare_tokens_can_be_sampled[ppo_sentiment]
  - torch.minimum(response_lengths(tokens, stop_ids), max_new_tokens)
  + response_lengths(tokens, stop_ids)
ppo_dialog.generate: the prompt may begin the end mark of an answer
  math/test_stop_sequences.py::test_a_mark_that_the_prompt_began_does_not_end_the_answer
  - tokens[rows, : t + 1]
  + torch.cat([ids[rows], tokens[rows, : t + 1]], 1)
ppo_dialog.load_end_criteria: EOS ends no answer
  math/test_stop_sequences.py::test_eos_ends_an_answer_too
  - [transformers.EosTokenCriteria(tokenizer.eos_token_id)]
  + []
ppo_sentiment.decode: the reward reads BOS (UserError)
  runs/test_reward_functions.py::test_a_function_gets_the_columns_of_its_rows[ppo_sentiment]
  - tokenizer.bos_token_id, tokenizer.eos
  + tokenizer.eos

# Sampling and log-probabilities

ppo_sentiment.rollout: old log-probabilities in bf16 (trap 10, UserError)
  runs/test_ppo_sentiment.py::test_learning_rate_0_changes_nothing
  - "logprobs": logprobs,
  + "logprobs": logprobs.bfloat16().float(),
ppo_sentiment.train: a first ratio that is not 1 is accepted (trap 10)
  runs/test_ppo_sentiment.py::test_a_model_that_changes_between_calls_ends_the_run[ppo_sentiment]
  - assert gap < 0.02,
  + assert gap < 100,
grpo_math.train: a sampler that reads less than the update is accepted (trap 10)
  runs/test_ppo_sentiment.py::test_a_sampler_that_reads_less_ends_the_run[grpo_math]
  - assert gap < 0.1,
  + assert gap < 100,
rloo_tldr.train: the ratio of rloo is of a mean token (trap 10)
  runs/test_evaluation_rloo.py::test_two_updates_by_hand[plain]
  - new_logprobs, old_logprobs, advantages[rows]
  + new_logprobs / t, old_logprobs / t, advantages[rows]
ppo_sentiment.sample_next: the sampler's log-probability is that of another row's token (trap 10)
  math/test_generation.py::test_sampling_log_probabilities_are_those_of_the_update
  - token[:, None]).squeeze(1).log()
  + token.roll(1)[:, None]).squeeze(1).log()
ppo_sentiment.sample_next: no temperature in sampling (trap 11)
  math/test_generation.py::test_generate_samples_from_transformers_softmax[0.7-llama]
  - token_logits(hidden, head.weight, temperature, head.bias)
  + token_logits(hidden, head.weight, 1.0, head.bias)
ppo_sentiment.token_logprobs: no temperature in log-probabilities (trap 11)
  math/test_output_layer.py::test_values_and_gradients_agree_with_autograd
  - token_logits(hidden, weight, temperature, bias)
  + token_logits(hidden, weight, 1.0, bias)
ppo_sentiment.reference_logprobs: no temperature in the reference (trap 11)
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[reviews_run]
  - response_logprobs(ref_model, *inputs)
  + response_logprobs(ref_model, *inputs[:3], 1.0)
ppo_dialog.rollout: no temperature in the old log-probabilities (trap 11, UserError)
  runs/test_chat.py::test_flags_of_a_chat
  - ], t, args.temperature
  + ], t, 1.0
rloo_tldr.sample_next: top-k in rollouts (trap 12)
  math/test_generation.py::test_generate_groups_is_generate_for_each_response
  - token_logits(hidden, head.weight, temperature, head.bias)
  + (x := token_logits(hidden, head.weight, temperature, head.bias)).where(x >= x.topk(50)[0][:, -1:], -1e9)
ppo_sentiment.sample_next: probabilities of a bf16 model in bf16 (trap 12)
  math/test_generation.py::test_generate_under_autocast_sums_in_fp32
  - head.bias).softmax(-1)
  + head.bias).bfloat16().softmax(-1).float()
ppo_dialog.generate: one uniform number for all tokens (trap 12)
  runs/test_evaluation_ppo.py::test_responses_come_from_the_policy_of_their_time[dialogs_run]
  - uniforms[rows, t]
  + uniforms[rows, 0]
ppo_sentiment.sample_tokens: a token of probability 0 is sampled (trap 12)
  math/test_sampling.py::test_sample_tokens_never_selects_probability_0
  - target, right=True
  + target
ppo_sentiment.load_model: dropout stays on (trap 13)
  math/test_log_probabilities.py::test_train_mode_has_no_dropout
  - setattr(module, key, 0.0)
  + pass
sft.add_lora: dropout in LoRA (trap 13)
  math/test_log_probabilities.py::test_lora_has_no_dropout
  - lora_alpha=args.lora_alpha,
  + lora_alpha=args.lora_alpha, lora_dropout=0.1,
ppo_sentiment.reference_logprobs: the reference keeps the adapter on (trap 14)
  math/test_log_probabilities.py::test_the_reference_under_lora_is_the_base_model
  - policy.disable_adapter()
  + torch.no_grad()
ppo_sentiment.load_model: an adapter is read as a model (trap 14)
  math/test_log_probabilities.py::test_an_adapter_is_merged_into_its_base[4]
  - if transformers.utils.peft_utils.find_adapter_config_file(path) is not None:
  + if False:
sft.load_model: the revision of an adapter's base is not read (trap 14)
  math/test_log_probabilities.py::test_the_revision_of_the_base
  - kwargs |= dict(revision=saved.revision)
  + pass
ppo_sentiment.load_model: a new adapter names the base without the old one (trap 14)
  math/test_log_probabilities.py::test_an_adapter_is_merged_into_its_base[4]
  - model.name_or_path = path  # the base of a new adapter
  + pass
ppo_sentiment.save_policy: adapter/ has no tokenizer
  math/test_log_probabilities.py::test_plain_transformers_loads_what_is_saved[4]
  - tokenizer.save_pretrained(folder.parent / "adapter")
  + pass
ppo_sentiment.train: other held-out prompts for each seed
  runs/test_evaluation_during_training.py::test_seeds_are_compared_on_the_same_rows[ppo_sentiment]
  - replace(args, seed=0)
  + args
rloo_tldr.choose_held_out: a chat judge gets posts without a reference
  runs/test_evaluation_rloo.py::test_a_judge_gets_posts_with_a_reference
  - args.judge_model is not None or args.judge_fn is not None
  + args.judge_fn is not None
rloo_tldr.choose_held_out: other held-out posts for each seed
  runs/test_evaluation_during_training.py::test_seeds_are_compared_on_the_same_rows[rloo_tldr]
  - seed=0)
  + seed=args.seed)
grpo_math.load_prompts: other held-out tasks for each seed
  runs/test_evaluation_during_training.py::test_seeds_are_compared_on_the_same_rows[grpo_math]
  - seed=0)
  + seed=args.seed)
ppo_sentiment.sample_tokens: a cumulative sum in fp32 (trap 12)
  math/test_sampling.py::test_sample_tokens_finds_rare_tokens_after_a_likely_one
  - cumsum(1, dtype=torch.float64)
  + cumsum(1)
rloo_tldr.draw_batch: uniforms in fp32 (trap 12)
  runs/test_ppo_sentiment.py::test_rare_tokens_can_be_sampled[rloo_tldr]
  - dtype=torch.float64
  + dtype=torch.float32
ppo_sentiment.generate: rows that go on read the cache of others
  math/test_generation.py::test_generate_samples_from_transformers_softmax
  - cache.reorder_cache(keep)
  + cache.reorder_cache(torch.arange(len(keep)))

# Token steps that a GPU records

rloo_tldr.generate_recorded: the column of a recorded step is a number (trap 47)
  math/test_recorded_steps.py::test_recorded_steps_are_called_steps[False-False-llama]
  - t = column - C
  + t = column.tolist()[0] - C
rloo_tldr.generate_recorded: a recorded step asks whether all responses have ended (trap 47)
  math/test_recorded_steps.py::test_recorded_steps_are_called_steps[False-False-llama]
  - column.add_(1)
  + column.add_(0 if torch.isin(token, stop_ids).all() else 1)
rloo_tldr.generate_recorded: a step does not change the hidden states in place (trap 47)
  math/test_recorded_steps.py::test_recorded_steps_are_called_steps[False-False-llama]
  - hidden.copy_(hidden_states
  + hidden.clone().copy_(hidden_states
rloo_tldr.FixedSizeLayer: a recorded step makes a new tensor for the keys (trap 47)
  math/test_recorded_steps.py::test_recorded_steps_are_called_steps[False-False-llama]
  - self.keys.index_copy_(2,
  + self.keys = self.keys.index_copy(2,
rloo_tldr.repeat: autocast rounds the weights while recording, and the next call uses them (trap 47)
  math/test_recorded_steps.py::test_recorded_steps_are_called_steps[True-False-llama]
  -     graph = torch.cuda.CUDAGraph()
  -     with torch.cuda.graph(graph, capture_error_mode="thread_local"):
  -         step()  # only recorded, not executed
  +     graph = torch.cuda.CUDAGraph()
  +     torch.clear_autocast_cache()
  +     with torch.cuda.graph(graph, capture_error_mode="thread_local"):
  +         step()
  +     step()
  +     count -= 1
rloo_tldr.generate_recorded: responses go on until their round is over
  math/test_recorded_steps.py::test_recorded_steps_are_called_steps[False-False-llama]
  - tokens.where(valid, 0), logprobs
  + tokens, logprobs
grpo_math.generate_recorded: all rows stay in the cache (RuntimeError)
  math/test_recorded_steps.py::test_grpo_records_too
  - if len(keep) < len(rows):
  -             cache.reorder_cache(keep)
  -             rows
  + if True:
  +             rows
rloo_tldr.can_be_recorded: sliding windows are recorded
  math/test_recorded_steps.py::test_what_cannot_be_recorded[mistral-False]
  - and is_plain
  + and True
rloo_tldr.can_be_recorded: steps that need the CPU are recorded
  math/test_recorded_steps.py::test_steps_that_need_the_cpu_are_not_recorded[falcon]
  - not (needs_cpu or is_quantized)
  + not is_quantized
rloo_tldr.can_be_recorded: models that transformers cannot compile are recorded
  math/test_recorded_steps.py::test_what_cannot_be_recorded[gpt_neo-False]
  - body._can_compile_fullgraph and
  + True and
ppo_sentiment.load_model: a fused norm has weights of its own
  math/test_recorded_steps.py::test_fused_norms_are_the_same
  - norm.weight = child.weight
  + pass

# The output layer, in chunks

ppo_sentiment.token_logprobs: the bias of the head is forgotten (trap 43)
  math/test_output_layer.py::test_values_and_gradients_agree_with_autograd[1-0.7]
  - token_logits(hidden, weight, temperature, bias)
  + token_logits(hidden, weight, temperature)
ppo_sentiment.LogprobsAndEntropies: an entropy bonus lowers the entropy
  math/test_output_layer.py::test_the_entropies_alone_have_their_gradient
  - grad -= grad_entropies
  + grad += grad_entropies
ppo_sentiment.LogprobsAndEntropies: the gradient is that of another row
  math/test_output_layer.py::test_values_and_gradients_agree_with_autograd
  - grad_logprobs[:, None])
  + grad_logprobs.roll(1)[:, None])
ppo_sentiment.token_logprobs: all chunks are kept
  math/test_output_layer.py::test_at_most_2_to_25_numbers_are_kept
  - (i + 1) * rows_at_once * len(weight) <= budget
  + True
sft.next_token_loss: correct tokens are counted without the bias
  math/test_fine_tuning.py::test_cross_entropy_in_chunks
  - F.linear(chunk, weight, bias)
  + F.linear(chunk, weight)
ppo_sentiment.token_logits: logits are rounded to bf16
  math/test_output_layer.py::test_logits_are_never_rounded_to_bf16
  - enabled=False
  + dtype=torch.bfloat16

# Rewards

ppo_sentiment.token_rewards: the score at every token (trap 15)
  math/test_math.py::test_token_rewards_by_hand
  - rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))
  + rewards + scores[:, None]
rloo_tldr.train: the EOS penalty replaces the score (trap 17)
  runs/test_evaluation_rloo.py::test_two_updates_by_hand[plain]
  - scores - args.missing_eos_penalty)
  + torch.full_like(scores, -args.missing_eos_penalty))
ppo_dialog.train: the EOS penalty hits responses that ended (trap 17)
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[dialogs_run]
  - torch.where(b["stopped"], scores
  + torch.where(~b["stopped"], scores
ppo_sentiment.train: the EOS penalty before the clip (trap 18)
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[reviews_run]
  - scores - args.missing_eos_penalty)
  + b["raw_scores"] - args.missing_eos_penalty).clamp(-1.5, 1.5)
ppo_sentiment.train: the logged KL is another estimate than that of the reward (trap 19)
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[reviews_run]
  - kl_per_response = kl.sum(1).mean()
  + kl_per_response = (0.5 * kl**2).sum(1).mean()
ppo_sentiment.masked_whiten: whitening with the unbiased variance (trap 20)
  math/test_math.py::test_masked_whiten_by_hand
  - variance = masked_mean((values - mean) ** 2, mask)
  + variance = values[mask].var()
ppo_sentiment.train: whitened rewards lose their mean in the run (trap 20)
  runs/test_ppo_sentiment.py::test_whiten_rewards
  - valid, shift_mean=False)
  + valid)
ppo_sentiment.masked_whiten: whitening counts pads (trap 20)
  math/test_math.py::test_masked_whiten_agrees_with_naive
  - mean = masked_mean(values, mask)
  + mean = values.mean()
ppo_dialog.train: advantages are not whitened (trap 20)
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[dialogs_run]
  - advantages = masked_whiten(advantages, valid)
  + pass
ppo_sentiment.train: the coefficient follows the KL of one process (trap 21)
  runs/test_processes.py::test_two_processes_give_the_numbers_of_one[ddp-ppo_sentiment]
  - adaptive_kl_coef(kl_coef, metrics["objective/kl"]
  + adaptive_kl_coef(kl_coef, kl.chunk(world)[accelerator.process_index].sum(1).mean().item()
ppo_sentiment.adaptive_kl_coef: the adaptive coefficient is not clipped (trap 21)
  math/test_math.py::test_adaptive_kl_coef_by_hand
  - min(max(error, -0.2), 0.2)
  + error
ppo_dialog.train: the KL target is a mean per token (trap 44)
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[dialogs_run]
  - adaptive_kl_coef(kl_coef, metrics["objective/kl"]
  + adaptive_kl_coef(kl_coef, metrics["objective/kl"] / metrics["completions/mean_length"]
rloo_tldr.train: the KL of rloo is a mean per token (trap 44)
  runs/test_evaluation_rloo.py::test_two_updates_by_hand[plain]
  - kl = token_kl.sum(1)
  + kl = token_kl.mean(1)
ppo_sentiment.load_label_scorer: a label by its place, not by its name (trap 22)
  math/test_classifiers.py::test_a_label_is_scored_by_its_logit_and_its_probability
  - return logits[:, label]
  + return logits.sort(-1).values[:, label]
ppo_sentiment.load_label_scorer: the reward model gets the policy's tokenizer (trap 23, IndexError)
  math/test_classifiers.py::test_a_reward_model_may_have_another_tokenizer
  - load_tokenizer(name)
  + load_tokenizer("checkpoints/reviews-lm")
rloo_tldr.load_reward_model: the reward offset is not subtracted (trap 24)
  runs/test_rloo_tldr.py::test_the_score_is_transformers_own
  - (scores - offset).tolist()
  + scores.tolist()
reward_model.train: the reward offset has the wrong sign (trap 24)
  runs/test_reward_model.py::test_references_have_the_mean_score_0
  - reward_offset = offset
  + reward_offset = -offset
ppo_sentiment.call_reward_functions: a reward that is not finite is accepted
  faults/test_bad_input.py::test_wrong_rewards
  - not math.isfinite(score)]
  + False]
ppo_sentiment.Run.on_signal: a signal makes a tensor (TypeError)
  runs/test_resume.py::test_a_signal_makes_no_tensor
  - self.got_signal = True
  + self.accelerator.set_trigger()
ppo_sentiment.Run.start: a run under nohup ends with its terminal (SystemExit)
  runs/test_resume.py::test_a_signal_that_the_run_was_told_to_ignore
  - if signal.getsignal(number) != signal.SIG_IGN:
  + if True:
check.check_label: a reward model of pairs is read as a classifier
  check/test_check_models.py::test_one_output_for_a_label
  - if len(labels) == 1:
  + if False:
reward_model.sequence_logits: the logits of a BERT are rounded to bf16
  math/test_classifiers.py::test_the_logits_of_a_bert_are_not_rounded
  - ids.device.type, enabled=False):
  -             return
  + ids.device.type, enabled=True):
  +             return
check.check_critic: a critic reads the tokens as other words
  check/test_check_models.py::test_a_critic_with_another_vocabulary
  - own != size
  + False
ppo_dialog.load_reward: METEOR of the answer as reference (trap 39)
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[dialogs_run]
  - meteor(turn.reference, answer)
  + meteor(answer, turn.reference)
ppo_dialog.load_reward: acts that begin at 0 in ppo_dialog (trap 38)
  runs/test_ppo_dialog.py::test_intent_by_hand[own]
  - device=device) - 1  #
  + device=device) % probs.shape[1]  #
reward_model.load_answers: acts that begin at 0 in the classifier (trap 38)
  runs/test_reward_model.py::test_answers_and_acts
  - act - 1
  + act
ppo_dialog.text_metrics: BLEU of the references against the answers
  runs/test_evaluation_ppo.py::test_the_table_of_dialogs
  - corpus_bleu(answers, [references]
  + corpus_bleu(references, [answers]
rloo_tldr.compare_scores: a tie is a win (trap 40)
  runs/test_evaluation_rloo.py::test_a_judge_of_scores_sees_both_texts_with_their_prompt
  - (ours == theirs), 0.5
  + (ours == theirs), 1.0
judge.ask_chat_model: a chat judge that prefers a place (trap 40)
  runs/test_rloo_tldr.py::test_a_chat_judge_reads_verdicts
  - float((verdict[1] == "A") == response_is_a)
  + float(verdict[1] == "A")
ppo_sentiment.rollout: a reward that does not apply makes nan (AttributeError)
  runs/test_reward_functions.py::test_a_function_that_does_not_apply[ppo_sentiment]
  - .nan_to_num()
  +
rloo_tldr.train: the judge gets the posts in another order than the responses
  runs/test_reward_functions.py::test_the_judge_of_an_update_gets_what_the_reward_gets
  - [post for post in prompt_share["examples"] for _ in range(k)]
  + prompt_share["examples"] * k

# Groups and advantages

rloo_tldr.rloo_advantages: groups of RLOO are not neighbors (trap 25)
  math/test_math.py::test_rloo_advantages_of_trls_page
  - .view(-1, rloo_k)
  + .view(rloo_k, -1).T
rloo_tldr.rloo_advantages: a mean of all responses in place of the others (trap 25)
  math/test_math.py::test_rloo_advantages_of_trls_page
  - sum_of_others / (rloo_k - 1)
  + rewards.mean(0)
rloo_tldr.generate: responses continue the prompts of others (trap 25)
  math/test_generation.py::test_generate_groups_is_generate_for_each_response
  - .repeat_interleave(k)
  + .repeat(k)
rloo_tldr.sample_responses: rewards read the prompts of other responses (trap 25)
  runs/test_reward_functions.py::test_the_judge_of_an_update_gets_what_the_reward_gets
  - [example for example in batch["examples"] for _ in range(k)]
  + batch["examples"] * k
ppo_sentiment.gae: a value after the end (trap 30)
  math/test_math.py::test_gae_agrees_with_naive
  - torch.where(mask, values, 0.0).float()
  + values.float()
ppo_sentiment.gae: gae forwards in time (trap 30)
  math/test_math.py::test_gae_by_hand
  - reversed(range(rewards.shape[1]))
  + range(rewards.shape[1])

# Losses

rloo_tldr.kl_per_token: k3 with the wrong sign (trap 32)
  math/test_math.py::test_kl_per_token_agrees_with_naive
  - torch.expm1(-log_ratio) + log_ratio
  + torch.expm1(log_ratio) - log_ratio
rloo_tldr.train: a KL in the loss is in the reward, too (trap 32)
  runs/test_evaluation_rloo.py::test_two_updates_by_hand[k2 in the loss]
  - kl if args.kl_estimator == "k1" else scores
  + kl
ppo_sentiment.clipped_policy_loss: the policy loss takes the better of two
  math/test_math.py::test_clipped_policy_loss_agrees_with_naive
  - torch.max(
  + torch.min(
ppo_sentiment.clipped_value_loss: the value loss is not clipped
  math/test_math.py::test_clipped_value_loss_by_hand
  - 0.5 * torch.max(unclipped, clipped)
  + 0.5 * unclipped
reward_model.pair_loss: a margin that is added
  math/test_math.py::test_pair_loss_agrees_with_naive
  - - min_difference
  + + min_difference
reward_model.pair_table: a long ranking counts more than a short one
  math/test_math.py::test_pairs_by_hand
  - 1 / len(pairs)
  + 1.0
reward_model.load_preference_rows: pairs of equal texts are learned
  runs/test_reward_model.py::test_responses_that_are_equal_after_the_cut
  -  if ids not in texts[:i]
  +
ppo_dialog.train: approxkl without its half
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[dialogs_run]
  - 0.5 * log_ratio**2
  + log_ratio**2

# Minibatches and optimizer steps

rloo_tldr.train: num_mini_batches is ignored (trap 27)
  runs/test_evaluation_rloo.py::test_two_updates_by_hand[minibatches]
  - order.split(P // args.num_mini_batches)
  + order.split(P)
ppo_sentiment.train: a sum of micro-batch means in ppo (trap 28)
  runs/test_ppo_sentiment.py::test_the_gradient_does_not_depend_on_micro_batches
  - .sum() / num_tokens
  + .mean() / args.gradient_accumulation_steps
rloo_tldr.train: a sum of micro-batch means in rloo (trap 28)
  runs/test_evaluation_rloo.py::test_two_updates_by_hand[plain]
  - response_loss.sum() / (len(minibatch) * k)
  + response_loss.mean()
sft.train: a sum of micro-batch means in sft (trap 28)
  runs/test_sft.py::test_sft_gradient_does_not_depend_on_micro_batches
  - mb_loss_sum / num_labels
  + mb_loss_sum / (mb["labels"] != -100).sum() / len(micro_batches)
reward_model.train: the loss of the reward model is not divided (trap 28)
  runs/test_reward_model.py::test_every_number_of_a_preference_model[pairs_of]
  - (weight * losses).sum() / B
  + (weight * losses).sum()
ppo_sentiment.train: the gradient is not scaled by the processes (trap 28)
  runs/test_processes.py::test_two_processes_give_the_numbers_of_one[ddp-ppo_sentiment]
  - loss * world * args
  + loss * args
ppo_sentiment.train: accelerate divides by the number of micro-batches (trap 28)
  runs/test_ppo_sentiment.py::test_the_gradient_does_not_depend_on_micro_batches
  - loss * world * args.gradient_accumulation_steps
  + loss * world
rloo_tldr.train: gradients are never zeroed (trap 29)
  runs/test_resume.py::test_sigterm_then_resume[rloo_tldr]
  - optimizer.zero_grad(set_to_none=world == 1)
  + pass
ppo_sentiment.start_accelerator: DDP keeps gradients twice
  runs/test_processes.py::test_ddp_keeps_gradients_once
  - gradient_as_bucket_view=True
  + gradient_as_bucket_view=False
ppo_sentiment.make_learner: adam_eps does not reach the optimizer (trap 31)
  math/test_update.py::test_flags_reach_the_optimizer
  - = args.adam_eps
  + = 1e-8
grpo_math.train: gradients are not clipped
  runs/test_evaluation_grpo.py::test_two_updates_by_hand[no KL, clipped gradient]
  - args.max_grad_norm or math.inf
  + math.inf
ppo_sentiment.learning_rate: the learning rate is one update ahead
  math/test_update.py::test_learning_rates
  - (update - 1 - warmup)
  + (update - warmup)
ppo_dialog.train: the loss of a dialog minibatch is divided by the mean number of tokens
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[dialogs_run]
  - num_tokens = valid[minibatch].sum()
  + num_tokens = valid.sum() / args.num_mini_batches

# Flags

rloo_tldr.train: the estimator of a KL in the loss is not used (trap 36)
  runs/test_evaluation_rloo.py::test_two_updates_by_hand[k2 in the loss]
  - args.kl_estimator)
  + "k3")
ppo_sentiment.train: vf_coef is not used (trap 36)
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[reviews_run]
  - args.vf_coef * value_loss
  + value_loss
ppo_dialog.train: gamma and lambda swapped in the run (trap 36)
  runs/test_evaluation_ppo.py::test_every_metric_of_every_update[dialogs_run]
  - args.gamma, args.lam
  + args.lam, args.gamma
ppo_sentiment.parse_args: a model flag with hyphens names no model
  runs/test_first_steps.py::test_a_named_model_means_the_published_defaults[ppo_sentiment-model_name_or_path]
  - .strip("-").replace("-", "_")
  + .strip("-")

check.check_numbers: a flag with a negative default is refused (UserError)
  faults/test_bad_input.py::test_a_flag_whose_default_is_negative
  - and default < 0
  + and False

# Documents of sft.py

sft.completion_document: sft learns prompts
  math/test_fine_tuning.py::test_labels_of_prompts_and_completions
  - [-100] * len(prompt) if args.completion_only_loss else prompt
  + prompt
sft.collate_rows: packed positions go on
  math/test_fine_tuning.py::test_packed_documents_do_not_see_each_other[gpt2]
  - torch.arange(len(document_ids))
  + torch.arange(start, end)
sft.load_documents: a document is learned from the one before (IndexError)
  runs/test_sft.py::test_packing_changes_no_loss
  - [-100, *labels[1 : args.max_length]]
  + labels[: args.max_length]
sft.train: held-out documents are not drawn at random
  runs/test_sft.py::test_held_out_documents_are_drawn_at_random
  - [all_held_out[i] for i in order[: args.num_eval_prompts]]
  + all_held_out[: args.num_eval_prompts]
sft.write_samples: the prompt of a sample of a chat ends at its first learned turn
  runs/test_sft.py::test_prompts_of_samples
  - max(i for i, label
  + min(i for i, label
sft.find_end_tokens: a stop token is the last token of a document, learned or not
  data/test_chats.py::test_what_ends_a_response
  - for _, labels in documents
  + for labels, _ in documents
sft.find_end_tokens: the end of a document that was not cut is no end
  data/test_chats.py::test_what_ends_a_response
  - if len(labels) < max_length:
  + if len(labels) > max_length:
sft.make_document: BOS is dropped
  runs/test_first_steps.py::test_bos_in_documents_of_sft
  - tokenizer(example["text"]).
  + tokenizer(example["text"], add_special_tokens=False).
grpo_math.task_prompt: a null in the template becomes None (KeyError)
  runs/test_grpo_math.py::test_a_row_with_an_empty_part_of_its_prompt_is_skipped
  - value in (None, [])
  + value == []
reward_model.find_prompt: a prompt beside chats is dropped
  faults/test_public_reports.py::test_a_prompt_beside_chats
  - [{"role": "user", "content": prompt}]
  + []
check.check_reward_models: a classifier that reads pads
  check/test_check_models.py::test_a_classifier_that_reads_padding
  - "xlnet",
  +
check.reads_left_to_right: a critic that reads pads
  faults/test_public_reports.py::test_a_critic_that_cannot_read_left_padding
  - torch.allclose(padded, alone, rtol=0.01, atol=0.01)
  + True

# Processes, checkpoints, resuming

ppo_sentiment.train: prompts and uniforms drawn by process (trap 33)
  runs/test_processes.py::test_two_processes_give_the_numbers_of_one[ddp-ppo_sentiment]
  - B, B, args, update)
  + B, B, args, (update, accelerator.process_index))
ppo_sentiment.generator_for: all updates draw the same (trap 33)
  math/test_math.py::test_random_numbers_depend_only_on_seed_and_purpose
  - repr((seed, *purpose))
  + repr((seed, *purpose[:1]))
ppo_sentiment.train: whitening by process (trap 20)
  runs/test_processes.py::test_two_processes_give_the_numbers_of_one[ddp-ppo_sentiment]
  - advantages = masked_whiten(advantages, valid)
  + advantages = torch.cat(list(map(masked_whiten, advantages.chunk(world), valid.chunk(world))))
ppo_sentiment.train: the update goes around the wrapped module (trap 42)
  runs/test_processes.py::test_two_processes_give_the_numbers_of_one[ddp-ppo_sentiment]
  - new_values = learner(
  + new_values = model(
ppo_sentiment.start_accelerator: FSDP2 runs (trap 42, AttributeError)
  runs/test_processes.py::test_fsdp2_is_refused[ppo_sentiment]
  - == "FSDP"
  + == "none"
rloo_tldr.train: all processes draw the same random numbers for reward functions
  faults/test_public_reports.py::test_each_process_has_random_numbers_of_its_own[rloo_tldr]
  - set_global_seed(args.seed, update, accelerator.process_index)
  + set_global_seed(args.seed, update)
ppo_dialog.Run.start: resume without optimizer (trap 34)
  runs/test_resume.py::test_sigterm_then_resume[ppo_dialog]
  - accelerator.load_state(newest)
  + load_trained([*accelerator._models], newest)
ppo_sentiment.train: resume without KL coefficient (trap 34)
  runs/test_resume.py::test_sigterm_then_resume[ppo_sentiment]
  - state.get("kl_coef", args.kl_coef)
  + args.kl_coef
reward_model.train: resume at the beginning of the data (trap 34)
  runs/test_resume.py::test_sigterm_then_resume[reward_model]
  - (update - 1) * B, B
  + (update - 1 - state["update"]) * B, B
ppo_dialog.load_trained: resume without the value head (trap 34)
  runs/test_resume.py::test_sigterm_then_resume[ppo_dialog]
  - for name, p in trainable(accelerate.utils.extract_model_from_parallel(model)).items():
  + for name, p in [*trainable(accelerate.utils.extract_model_from_parallel(model)).items()][:-2]:
sft.train: resume with the learning rate of the first update (trap 34)
  runs/test_resume.py::test_sigterm_then_resume[sft]
  - learning_rate(args, update, updates)
  + learning_rate(args, update - state["update"], updates)
ppo_sentiment.Run.start: resume keeps later rows (trap 34)
  runs/test_resume.py::test_what_came_after_the_checkpoint_is_forgotten[ppo_sentiment]
  - os.truncate(path, state["sizes"].get(path.name, 0))
  + pass
ppo_sentiment.Run.checkpoint: old checkpoints are never deleted
  runs/test_ppo_sentiment.py::test_old_checkpoints_are_deleted
  - [: -max(self.args.keep_checkpoints, 1)]
  + [:0]
ppo_sentiment.Run.checkpoints: a copy of a checkpoint counts as one (ValueError)
  runs/test_resume.py::test_only_the_checkpoints_of_the_run_count
  - path.name.isdecimal()
  + path.name[:6].isdecimal()
ppo_sentiment.Run.on_signal: the second SIGHUP of a closed terminal kills the run
  runs/test_resume.py::test_every_signal_saves
  - if number == signal.SIGINT:
  -             signal.signal(signal.SIGINT,
  + if True:
  +             signal.signal(number,
ppo_sentiment.Run.__init__: a signal before training is only noted (TypeError)
  runs/test_resume.py::test_a_signal_before_training[ppo_sentiment]
  - self.to_show, self.last_line_time, self.got_signal = [], 0.0, False
  + self.to_show, self.last_line_time, self.got_signal = [], 0.0, False
  +         signal.signal(signal.SIGTERM, self.on_signal)
ppo_sentiment.Run.checkpoint: a closed pipe costs an update
  runs/test_resume.py::test_output_that_nobody_reads
  - update, save_every = state["update"], self.args.save_every
  + print(flush=True); update, save_every = state["update"], self.args.save_every
check.check_python: a run without asserts starts
  check/test_check_flags.py::test_python_without_asserts[1-True]
  - not in ("", "0")
  + not in ("", "0", "1")
ppo_sentiment.Run.log: a metric that is not finite is logged and the run goes on
  runs/test_ppo_sentiment.py::test_a_metric_that_is_not_finite_ends_the_run
  - if not_finite:
  + if False:
ppo_sentiment.train: each process trains on the whole minibatch
  runs/test_processes.py::test_two_processes_give_the_numbers_of_one[ddp-ppo_sentiment]
  - share[b["lengths"][share]
  + minibatch[b["lengths"][minibatch]
ppo_sentiment.stream_rows: each batch begins at the first row of its epoch
  math/test_math.py::test_stream_rows_is_one_stream
  - rows[start - first * num_rows :]
  + rows
sft.Run.start: a resumed run may have another batch
  runs/test_resume.py::test_resume_with_other_micro_batches[sft]
  - if state["batch_size"] != batch_size:
  + if False:
ppo_sentiment.Run.__init__: a resumed run moves to another folder (FileNotFoundError)
  runs/test_resume.py::test_flags_of_a_resumed_run
  - args.resume or args.output_dir
  + args.output_dir
ppo_sentiment.parse_args: --resume accepts another scale of LoRA
  runs/test_resume.py::test_flags_of_a_resumed_run
  - and name not in MAY_CHANGE
  + and name not in (*MAY_CHANGE, "lora_alpha")
sft.Run.start: a run empties all files in its folder that look like its own
  runs/test_resume.py::test_files_of_yours_stay_as_they_are
  - filter(Path.exists, self.logs)
  + self.folder.glob("*.jsonl")

# GRPO

grpo_math.grpo_advantages: a deviation of GRPO with k in its denominator
  math/test_grpo.py::test_advantages_by_hand
  - correction=1
  + correction=0
grpo_math.grpo_advantages: a deviation of GRPO without its small number
  math/test_grpo.py::test_the_small_number_is_added_to_the_deviation
  - std + 1e-4
  + std + 1e-8
grpo_math.train: GRPO takes the mean of each response first
  math/test_grpo.py::test_the_loss_is_a_mean_over_tokens
  - (token_loss * mb_valid).sum() / num_tokens
  + (token_loss * mb_valid / mb_valid.sum(1, keepdim=True)).sum() / (len(minibatch) * k)
grpo_math.train: GRPO takes the mean of each micro-batch first
  runs/test_evaluation_grpo.py::test_two_updates_by_hand[plain]
  - (token_loss * mb_valid).sum() / num_tokens
  + (token_loss * mb_valid).sum() / mb_valid.sum() / args.gradient_accumulation_steps
grpo_math.train: a micro-batch too many is accepted (trap 27)
  runs/test_ppo_sentiment.py::test_another_number_of_micro_batches_ends_the_run[grpo_math]
  - assert accelerator.sync_gradients,
  + assert True,
grpo_math.train: metrics per response count tokens that are left out (trap 4)
  runs/test_grpo_math.py::test_metrics_of_tokens_that_are_left_out
  - tokens_trained / (B * args.num_ppo_epochs)
  + lengths.mean()
grpo_math.train: the largest gap is that of a token that is left out (trap 4)
  runs/test_grpo_math.py::test_metrics_of_tokens_that_are_left_out
  - (sampling_gap * mb_valid).max()
  + sampling_gap.max()
grpo_math.train: GRPO counts the tokens of one process
  runs/test_processes.py::test_two_processes_give_the_numbers_of_one[ddp-grpo_math]
  - (token_loss * mb_valid).sum() / num_tokens
  + (token_loss * mb_valid).sum() / (b["lengths"][rows_of_share].sum() * world)
grpo_math.sample_responses: GRPO does not train the stop token (RuntimeError)
  runs/test_evaluation_grpo.py::test_two_updates_by_hand[plain]
  - "mask": torch.cat([prompt_mask, valid], 1),
  -         "lengths": lengths,
  + "mask": torch.cat([prompt_mask, valid & ~is_stop], 1),
  +         "lengths": lengths - is_stop.any(1).long(),
grpo_math.train: the KL of GRPO has its arguments swapped
  math/test_grpo.py::test_the_loss_is_a_mean_over_tokens
  - new_logprobs, b["ref_logprobs"][rows, :t], "k3"
  + b["ref_logprobs"][rows, :t], new_logprobs, "k3"
grpo_math.train: old log-probabilities are the sampler's
  math/test_grpo.py::test_the_loss_is_a_mean_over_tokens
  - b["logprobs"][rows, :t]
  + b["sampling_logprobs"][rows, :t]
grpo_math.train: a ratio of 1 without a gradient
  runs/test_evaluation_grpo.py::test_one_step_per_batch[0.0]
  - old_logprobs = new_logprobs.detach()
  + old_logprobs = new_logprobs
grpo_math.train: the same random numbers in each update of GRPO
  runs/test_evaluation_grpo.py::test_each_response_has_its_own_random_numbers
  - k, args, update)
  + k, args, "update")
grpo_math.load_prompts: GRPO is evaluated on training tasks
  runs/test_evaluation_grpo.py::test_the_tasks_of_the_evaluation
  - "held-out": held_out_rows
  + "held-out": train_rows
grpo_math.evaluate: greedy responses are sampled
  runs/test_evaluation_grpo.py::test_greedy_responses_are_the_likeliest_tokens
  - temperature=0.01
  + temperature=args.temperature
grpo_math.train: a reference without a KL penalty
  runs/test_grpo_math.py::test_without_a_penalty_nobody_has_a_reference
  - , device) if has_kl else None
  + , device)
grpo_math.evaluate_set: a task to which the first function does not apply is wrong
  runs/test_evaluation_grpo.py::test_the_final_table_by_hand[after]
  - first_score.isnan(), score
  + first_score == first_score, score
grpo_math.evaluate_set: responses of other tasks
  runs/test_evaluation_grpo.py::test_evaluation_samples
  - slice(i * k, (i + 1) * k)
  + slice(i, None, len(share["examples"]))
grpo_math.report_evaluation: the table does not say who decides what is right
  runs/test_grpo_math.py::test_the_table_says_who_decides_what_is_right
  - ; right: 1 or more by {judge}"
  + "
grpo_math.task_metrics: pass@k asks for all responses
  runs/test_evaluation_grpo.py::test_the_final_table_by_hand[after]
  - any(record["right"])
  + all(record["right"])
grpo_math.task_metrics: the interval of pass@1 is over responses
  runs/test_evaluation_grpo.py::test_the_final_table_by_hand[after]
  - pstdev(pass_at_1)
  + pstdev(float(x) for record in records for x in record["right"])
grpo_math.end_tokens: only EOS ends a response
  runs/test_grpo_math.py::test_every_stop_token_of_the_model_ends_a_response
  - {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id}
  + {tokenizer.eos_token_id}
grpo_math.task_prompt: a second system message
  runs/test_grpo_math.py::test_prompts_that_are_chats
  - prompt[0]["role"]
  + prompt[-1]["role"]
grpo_math.load_tasks: the limit of a prompt does not count the last token
  runs/test_grpo_math.py::test_long_tasks_are_skipped
  - len(ids) <= args.max_prompt_length
  + len(ids) <= args.max_prompt_length + 1

# What a reader of the run folder looks at

ppo_sentiment.train: the score of samples.jsonl is that after clipping
  faults/test_public_reports.py::test_a_score_is_the_same_in_all_files[ppo_sentiment]
  - b["raw_scores"][:4].tolist()
  + scores[:4].tolist()
grpo_math.train: samples.jsonl shows responses of several tasks
  runs/test_evaluation_grpo.py::test_samples_during_the_run
  - responses[:k]
  + responses[::P]
ppo_sentiment.train: the texts of the first process count as those of all
  runs/test_processes.py::test_two_processes_give_the_numbers_of_one[ddp-ppo_sentiment]
  - accelerate.utils.gather_object(responses)
  + responses

# Data that are something else than they seem

ppo_sentiment.load_splits: the last rows of a file are held out
  runs/test_evaluation_ppo.py::test_which_split_is_held_out
  - random.Random(repr(x)).random()
  + 0
check.Inputs.splits: other JSON files are read by datasets
  faults/test_public_reports.py::test_json_in_other_files
  - {"json", "csv"}
  + {"csv"}
check.Inputs.splits: csv in other files is read by datasets
  faults/test_public_reports.py::test_csv_in_other_files
  - {"json", "csv"}
  + {"json"}
check.candidates: of two files of a split, both are read
  faults/test_public_reports.py::test_files_of_several_kinds
  - len(series) > 1
  + len(series) > 9
check.bad_csv_lines: a csv row with a value too many is read (trap 50, TypeError)
  faults/test_public_reports.py::test_a_csv_file_that_does_not_fit_its_header
  - len(cells) != len(header)
  + len(cells) < len(header)
ppo_sentiment.read_rows: a csv file with an open quote is read (trap 50)
  faults/test_public_reports.py::test_a_csv_file_with_an_open_quote
  - strict=True
  + strict=False
reward_model.find_classes: an empty label is a class
  faults/test_public_reports.py::test_labels_that_are_texts
  - {None, ""}
  + {None}
check.check_classes: texts with decimals are classes
  faults/test_public_reports.py::test_decimals_are_no_classes
  - -?\d*\.\d+
  + -?\d+\.\d+
check.check_messages: a list of parts is written as Python prints it (trap 48)
  check/test_check_chats.py::test_content_that_is_no_text
  - isinstance(message.get("content"), str) or
  + message.get("content") is not None or
check.check_messages: a weight of 0 is ignored (trap 48)
  check/test_check_chats.py::test_parts_that_the_template_does_not_read
  - if value not in (None, "", [], {})}
  + if value}
check.check_chat_columns: tools are ignored (trap 48)
  check/test_check_chats.py::test_columns_beside_a_chat
  - "tools", "chat_template_kwargs"
  + "chat_template_kwargs"
check.check_two_bos: BOS twice (trap 49)
  faults/test_public_reports.py::test_texts_that_begin_with_bos[grpo_math]
  - if list(example.ids[:2]) == [bos, bos]:
  + if False:
rloo_tldr.set_template_options: the saved template ignores what a caller says
  data/test_chats.py::test_options_of_the_chat_template[rloo_tldr]
  - {name} | default({value!r})
  + {value!r}
grpo_math.end_tokens: the end of a turn of a base model is no stop token (trap 16)
  data/test_chats.py::test_the_end_of_a_turn_is_a_stop_token
  - [:1]
  + [:0]
rloo_tldr.sample_responses: a special stop token is part of the text
  runs/test_rloo_tldr.py::test_another_stop_token
  - is_text |= is_stop & ~torch.isin(tokens, special_ids)
  + is_text |= is_stop
rloo_tldr.sample_responses: a stop token that is a word is cut from the text
  runs/test_rloo_tldr.py::test_another_stop_token
  - if args.stop_token_id is not None
  + if False
check.check_chat_texts: a chat that is stored as a text is one
  faults/test_public_reports.py::test_chats_as_texts[messages]
  - (role|content|
  + (role|
sft.train: the first rows of a file are trained on
  faults/test_public_reports.py::test_a_part_of_a_sorted_file
  - random.Random(0).sample(train_examples, count)
  + train_examples[:count]
check.prompts_elsewhere: answers without their prompt
  check/test_check_data.py::test_a_prompt_in_another_column
  - len(texts) > len(rows) / 2
  + False
check.check_preferences: a prompt is read twice
  check/test_check_data.py::test_a_prompt_in_its_responses
  - len(repeated) > len(texts) / 2
  + False
reward_model.read_preferences: responses come before chosen and rejected
  runs/test_reward_model.py::test_which_columns_decide
  - if row.get("chosen"):
  + if not responses and row.get("chosen"):
check.check_classes: each decimal is a class
  faults/test_public_reports.py::test_decimals_are_no_classes
  - if decimals:
  + if False:
check.check_scores: a row that nobody uses must have an answer (AttributeError)
  check/test_check_rewards.py::test_a_row_that_is_not_used_may_have_no_answer
  - if row is None or is_kept(x, row):
  + if True:
ppo_sentiment.call_reward_functions: a column is replaced
  faults/test_public_reports.py::test_a_column_with_the_name_of_an_argument
  - inputs = dict(prompts=prompts, completions=completions, completion_ids=completion_ids, **inputs)
  + inputs |= dict(prompts=prompts, completions=completions, completion_ids=completion_ids)
grpo_math.score_responses: functions get an answer without its beginning
  faults/test_public_reports.py::test_a_begun_answer_is_whole_for_rewards
  - beginning["content"] + response
  + response
judge.ask_chat_model: the thoughts of a judge count
  faults/test_public_reports.py::test_a_judge_that_thinks_first
  - .rpartition("</think>")
  + .rpartition("</thought>")
ppo_sentiment.distinct_bigrams: a text without spaces is one word
  faults/test_public_reports.py::test_words_of_scripts_without_spaces
  - r" \g<0> "
  + r"\g<0>"
grpo_math.train: the KL is that of the sampler
  faults/test_public_reports.py::test_the_kl_before_the_first_step
  - kl_per_token(old_logprobs, ref_logprobs, "k1")
  + kl_per_token(b["sampling_logprobs"][rows, :t], ref_logprobs, "k1")
ppo_sentiment.Run.start: two new runs share a folder
  faults/test_public_reports.py::test_two_runs_in_one_folder
  - exist_ok=args.resume is not None
  + exist_ok=True
ppo_sentiment.Run.start: a resumed run is a new one for its tracker
  faults/test_public_reports.py::test_a_resumed_run_keeps_its_beginning
  - .get("id")
  + .get("ID")

# Models, chats, servers

ppo_sentiment.save_policy: the saved model lacks the adapter
  math/test_log_probabilities.py::test_plain_transformers_loads_what_is_saved
  - policy.merge_and_unload()
  + policy.unload()
ppo_dialog.answer_text: an end mark inside the last token stays
  runs/test_chat.py::test_a_token_that_goes_on_after_the_end_mark[False]
  - text.split(end.strip())[0]
  + text.removesuffix(end.strip())
chat.chat: a chat has no BOS
  runs/test_chat.py::test_a_token_that_goes_on_after_the_end_mark[True]
  - args, bos)
  + args, [])
ppo_sentiment.eight_bit: rounding in 8 bit depends on the batch
  runs/test_ppo_sentiment.py::test_outliers_in_8_bit
  - load_in_8bit=True, llm_int8_threshold=0.0
  + load_in_8bit=True
ppo_sentiment.round_frozen_weights: a saved model loses digits
  math/test_log_probabilities.py::test_what_is_rounded_to_bf16[gpt2]
  - not (only_if_exact and
  + not (False and
ppo_sentiment.save_policy: frozen weights are saved in bf16
  math/test_log_probabilities.py::test_frozen_weights_in_bf16_change_no_bit[shared layers-llama]
  - policy.float()
  + policy.eval()
ppo_sentiment.save_policy: an adapter is merged into 8-bit weights (KeyError)
  runs/test_ppo_sentiment.py::test_lora_on_a_base_in_8_bit
  - if not getattr(policy, "is_quantized", False)
  + if True
judge.ask_chat_model: the chat judge reads a list of messages
  runs/test_evaluation_rloo.py::test_a_chat_judge_reads_the_text_of_a_chat
  - post=rloo_tldr.plain_text(post["prompt"])
  + post=post["prompt"]
ppo_sentiment.load_policy_and_value: a saved value head is not loaded (trap 35)
  runs/test_ppo_sentiment.py::test_the_value_head_survives_saving
  - model.value_head.load_state_dict(load_file(saved_head))
  + load_file(saved_head)
reward_model.train: a BERT that says bf16
  runs/test_reward_model.py::test_bf16_is_for_decoders
  - is_decoder and wants_bf16
  + wants_bf16
reward_model.build_classifier: a classifier with the offset of an earlier score
  runs/test_reward_model.py::test_a_classifier_has_no_offset
  - vars(model.config).pop("reward_offset", None)
  + pass
reward_model.build_classifier: a head for other labels is kept (trap 35, RuntimeError)
  runs/test_reward_model.py::test_a_head_of_another_size_is_replaced
  - not is_classifier or saved.num_labels != len(labels)
  + not is_classifier
reward_model.build_classifier: a saved score head is drawn again (trap 35)
  runs/test_reward_model.py::test_standard_deviation_of_a_new_head
  - not is_classifier or
  + True or
ppo_sentiment.load_reference: shared layers are copied
  runs/test_ppo_sentiment.py::test_shared_layers
  - memo=frozen
  + memo={}
ppo_sentiment.load_model: another activation than the model's
  math/test_log_probabilities.py::test_train_mode_has_no_dropout
  - nn.GELU("tanh")
  + nn.GELU()
ppo_sentiment.check_model: any head is taken for a matrix product (trap 43)
  math/test_log_probabilities.py::test_a_model_that_does_more_is_refused
  - if not gap < 0.1:
  + if False:
rloo_tldr.group_hidden_states: a response continues the prompt of another group
  math/test_groups.py::test_a_prompt_that_is_read_once_gives_the_same
  - cache.reorder_cache(prompt_of_row)
  + cache.reorder_cache(prompt_of_row.flip(0))
rloo_tldr.group_hidden_states: no gradient through the keys of the prompt
  math/test_groups.py::test_a_prompt_that_is_read_once_gives_the_same
  - cache.reorder_cache(prompt_of_row)
  + cache.layers[0].keys = cache.layers[0].keys.detach()
  +     cache.reorder_cache(prompt_of_row)
rloo_tldr.group_hidden_states: a prompt that begins with token 0 is one with padding
  math/test_groups.py::test_a_prompt_that_is_read_once_gives_the_same
  - ids.where(mask, -1)
  + ids.where(mask & (ids > 0), -1)
rloo_tldr.can_reuse_prompts: a cache in spite of gradient checkpointing
  math/test_groups.py::test_how_many_prompts_are_read
  - has_states or model.is_gradient_checkpointing
  + has_states
rloo_tldr.can_reuse_prompts: with gradient checkpointing, a rollout reads otherwise than the update (trap 10)
  math/test_groups.py::test_how_many_prompts_are_read
  - or model.is_gradient_checkpointing
  + or (model.training and model.is_gradient_checkpointing)
rloo_tldr.can_reuse_prompts: the states of linear attention serve several responses
  math/test_groups.py::test_how_many_prompts_are_read
  - has_states or model.is_gradient_checkpointing
  + model.is_gradient_checkpointing
rloo_tldr.sorted_groups: groups stay together for nothing
  math/test_groups.py::test_sorted_groups
  - rows if reuses_prompts else rows
  + rows if True else rows
rloo_tldr.sorted_groups: the rows of a group are not neighbors
  math/test_groups.py::test_sorted_groups
  - ).flatten()
  + ).T.flatten()
sft.check_model: any head is taken for a matrix product in sft (trap 43)
  math/test_fine_tuning.py::test_models_are_checked
  - if not gap < 3e-5:
  + if False:

# dpo_tldr.py: the loss, its pairs, its reference, and the evaluation

dpo_tldr.dpo_loss: the loss without a reference
  math/test_dpo.py::test_the_loss_and_its_gradient_in_plain_python
  - beta * (rejected - ref_rejected)
  + beta * rejected
dpo_tldr.dpo_loss: beta counts for one of the two scores
  math/test_dpo.py::test_the_loss_and_its_gradient_in_plain_python
  - rejected_scores = beta * (rejected
  + rejected_scores = (rejected
dpo_tldr.dpo_loss: smoothed labels the other way around
  math/test_dpo.py::test_the_loss_and_its_gradient_in_plain_python
  - (1 - label_smoothing) * loss_if_right + label_smoothing * loss_if_wrong
  + label_smoothing * loss_if_right + (1 - label_smoothing) * loss_if_wrong
dpo_tldr.dpo_loss: a sigmoid whose logarithm may be infinite
  math/test_dpo.py::test_a_large_difference_is_no_infinity
  - -F.logsigmoid(difference), -F
  + -torch.sigmoid(difference).log(), -F
dpo_tldr.pair_metrics: rewards without beta
  math/test_dpo.py::test_pair_metrics
  - (beta * (logprobs - ref_logprobs))
  + (logprobs - ref_logprobs)
dpo_tldr.collate_pairs: prompts are padded on the right
  math/test_dpo.py::test_a_batch_of_pairs
  - pad(prompts, padding_side="left")
  + pad(prompts)
dpo_tldr.collate_pairs: token 0 is padding
  math/test_dpo.py::test_samples_have_the_probabilities_of_the_model[own]
  - ids >= 0
  + ids > 7
dpo_tldr.pair_logprobs: log-probabilities in the order of the lengths
  math/test_dpo.py::test_log_probabilities_of_pairs
  - logprobs[rows] = model
  + logprobs[:len(rows)] = model
dpo_tldr.pair_logprobs: a mean over tokens instead of a sum
  math/test_dpo.py::test_log_probabilities_of_pairs
  - .sum(1)
  + .mean(1)
dpo_tldr.train: the reference of other pairs
  runs/test_dpo_tldr.py::test_the_reference_is_the_start
  - ref_logprobs[row_numbers[places]]
  + ref_logprobs[places]
dpo_tldr.train: the two responses of the update change places
  runs/test_dpo_tldr.py::test_a_policy_learns_pairs_by_heart
  - chosen, rejected = logprobs.unbind(1)
  + rejected, chosen = logprobs.unbind(1)
dpo_tldr.train: label smoothing is not passed on
  runs/test_dpo_tldr.py::test_the_reference_is_the_start
  - args.beta, args.label_smoothing
  + args.beta, 0.0
dpo_tldr.train: the loss is divided by the micro-batch
  runs/test_dpo_tldr.py::test_the_gradient_does_not_depend_on_micro_batches
  - losses.sum() / B
  + losses.mean()
dpo_tldr.train: the metrics are means of the last micro-batch
  runs/test_dpo_tldr.py::test_the_gradient_does_not_depend_on_micro_batches
  - metric_sums[name] += x
  + metric_sums[name] = x
dpo_tldr.train: the KL is that to the trained policy
  runs/test_dpo_tldr.py::test_the_policies_that_are_compared
  - samples = evaluate_samples(policy, posts, tokenizer, args, accelerator, ref_model=ref_model)
  + samples = evaluate_samples(policy, posts, tokenizer, args, accelerator, ref_model=policy)
dpo_tldr.evaluate_samples: other random numbers than rloo_tldr.py
  runs/test_dpo_tldr.py::test_the_responses_before_are_those_of_rloo
  - "tokens", "held-out")
  + "words", "held-out")
dpo_tldr.evaluate_samples: the KL counts what comes after the end
  runs/test_dpo_tldr.py::test_the_evaluation_by_hand
  - logprobs.where(valid, 0.0) - ref_logprobs
  + logprobs - ref_logprobs
dpo_tldr.evaluate_samples: the judge compares references with responses
  runs/test_dpo_tldr.py::test_the_evaluation_by_hand
  - (scores > reference_scores)
  + (scores < reference_scores)
dpo_tldr.evaluate_samples: the judge reads the end of a turn
  runs/test_dpo_tldr.py::test_what_the_judge_reads
  - valid & is_text
  + valid
dpo_tldr.generate: the temperature is forgotten
  math/test_dpo.py::test_samples_have_the_probabilities_of_the_model[own]
  - uniforms_of_step, temperature)
  + uniforms_of_step, 1.0)
dpo_tldr.generate: padding of prompts is read
  math/test_dpo.py::test_samples_have_the_probabilities_of_the_model[own]
  - F.pad(mask, (0, 1), value=True)
  + torch.ones_like(F.pad(mask, (0, 1)))
dpo_tldr.load_pairs: a ranking is its first two responses
  runs/test_dpo_tldr.py::test_a_ranking
  - [responses[0], responses[-1]]
  + [responses[0], responses[1]]
dpo_tldr.load_pairs: the length of the chosen response alone counts
  runs/test_dpo_tldr.py::test_rows_that_are_left_out_are_counted
  - elif text_length(pair) >
  + elif len(pair["ids"] + pair["responses"][0]) >
dpo_tldr.tokenize_pair: responses without EOS (trap 9)
  runs/test_dpo_tldr.py::test_texts
  - tokenizer(prompt).input_ids + with_eos(ids, tokenizer)
  + tokenizer(prompt).input_ids + ids
dpo_tldr.tokenize_pair: the line break after the end of a turn is scored (trap 57)
  data/test_chats.py::test_what_dpo_scores_is_what_is_learned[qwen2_5-own]
  - render_chat(tokenizer, prompt + response).rstrip()
  + render_chat(tokenizer, prompt + response)
dpo_tldr.tokenize_pair: an answer whose template writes no end has none (trap 57)
  data/test_chats.py::test_what_dpo_scores_is_what_is_learned[qwen2_5-without end]
  - else with_eos(ids, tokenizer) for ids in texts
  + else ids for ids in texts
dpo_tldr.tokenize_pair: what two answers begin with is part of the prompt
  runs/test_dpo_tldr.py::test_chats
  - [tokenize_prompt(tokenizer, prompt)] if prompt else []
  + []
dpo_tldr.tokenize_pair: a chat that contains its prompt has none
  runs/test_dpo_tldr.py::test_chats[implicit]
  - prompt + responses[0][:-1]
  + prompt
dpo_tldr.check_model: a model is not compared with itself
  runs/test_dpo_tldr.py::test_a_model_with_other_probabilities_is_refused
  - if not gap < 0.1:
  + if False:

# grpo_tools.py: sampled tokens, turns, tools, environments

grpo_tools.train: the policy learns what the tools wrote (trap 52)
  runs/test_grpo_tools.py::test_an_update_by_hand
  - (token_loss * mb_sampled).sum() / num_tokens
  + token_loss.sum() / num_tokens
grpo_tools.train: unlikely tokens of a tool make the KL infinite (UserError)
  runs/test_grpo_tools.py::test_what_a_tool_wrote_may_be_arbitrarily_unlikely
  - new_logprobs.where(mb_sampled, 0.0)
  + new_logprobs
grpo_tools.train: samples have a KL at the tokens of a tool
  runs/test_grpo_tools.py::test_tokens_of_samples
  - kl * sampled[:k]
  + kl
grpo_tools.train: the loss is divided by all tokens (trap 55)
  runs/test_grpo_tools.py::test_an_update_by_hand
  - num_tokens = sampled.view(P, k, T)[minibatch].sum()
  + num_tokens = b["mask"][:, C:].reshape(P, k, T)[minibatch].sum()
grpo_tools.train: lengths count what the tools wrote (trap 55)
  runs/test_grpo_tools.py::test_every_number_of_an_update
  - sampled_lengths = sampled.sum(1).float()
  + sampled_lengths = b["lengths"].float()
grpo_tools.train: means over tokens count what the tools wrote (trap 55)
  runs/test_grpo_tools.py::test_every_number_of_an_update
  - metric_sums[name] += (x * mb_sampled).sum()
  + metric_sums[name] += x.sum()
grpo_tools.train: the share of failed calls is a mean over trajectories
  runs/test_grpo_tools.py::test_every_number_of_an_update
  - b["failures"].sum() / num_calls
  + (b["failures"] / b["calls"].clamp(min=1)).mean()
grpo_tools.train: the share of tools' errors counts the policy's mistakes
  runs/test_grpo_tools.py::test_every_number_of_an_update
  - b["errors"].sum() / num_calls
  + b["failures"].sum() / num_calls
grpo_tools.train: the reasons of ends are one off
  runs/test_grpo_tools.py::test_every_number_of_an_update
  - for i, end in enumerate(ENDS)
  + for i, end in enumerate(ENDS, 1)
grpo_tools.train: turns are calls
  runs/test_grpo_tools.py::test_every_number_of_an_update
  - b["turns"].mean()
  + b["calls"].mean() + 1
grpo_tools.train: samples say that all tokens were sampled
  runs/test_grpo_tools.py::test_tokens_of_samples
  - "sampled": sampled[:k]
  + "sampled": b["mask"][:k, C:]
grpo_tools.evaluate_set: the last reward says what is right
  runs/test_grpo_tools.py::test_the_final_table
  - torch.where(first_score.isnan(), score, first_score)
  + torch.where(score.isnan(), first_score, score)
grpo_tools.evaluate_set: lengths of the evaluation count what the tools wrote (trap 55)
  runs/test_grpo_tools.py::test_the_final_table
  - b["sampled"].sum(1)
  + b["lengths"]
grpo_tools.trajectory_metrics: failed calls per trajectory
  runs/test_grpo_tools.py::test_the_final_table
  - mean("failures") / max(mean("calls"), 1e-8)
  + mean("failures")
grpo_tools.sample_responses: attention does not read what the tools wrote (trap 53)
  math/test_tools.py::test_attention_reads_all_tokens_of_a_trajectory
  - mask[i, first : C + t] = True
  + mask[i, first : C + t] = torch.tensor(len(x.example["ids"]) * [True] + x.sampled)
grpo_tools.sample_responses: the update does not see what the sampler saw (trap 53)
  math/test_tools.py::test_sampling_and_update_agree
  - mask[i, first : C + t] = True
  + mask[i, first : C + t] = torch.tensor(len(x.example["ids"]) * [True] + x.sampled)
grpo_tools.sample_responses: ends of turns count as padding (trap 54)
  math/test_tools.py::test_attention_reads_all_tokens_of_a_trajectory
  - mask[i, first : C + t] = True
  + mask[i, first : C + t] = ids[i, first : C + t] != 2
grpo_tools.sample_responses: tables show tasks without what environments say
  math/test_tools.py::test_siblings_may_begin_with_different_texts
  - plain_text(x.example["prompt"]) for x in trajectories
  + plain_text(x["prompt"]) for x in batch["examples"] for _ in range(batch["uniforms"].shape[1])
grpo_tools.sample_responses: tables show the prompt of the first sibling for all
  math/test_tools.py::test_siblings_may_begin_with_different_texts
  - plain_text(x.example["prompt"]) for x in trajectories
  + plain_text(trajectories[i // 4 * 4].example["prompt"]) for i in range(len(trajectories))
grpo_tools.sample_responses: a turn that stopped counts as an answer
  runs/test_grpo_tools.py::test_every_number_of_an_update
  - x.end in ENDS[:2] for x
  + x.tokens[-1] in stop_ids for x
grpo_tools.Trajectory.add: only the last turn is learned (trap 56)
  math/test_tools.py::test_earlier_messages_are_not_trained
  - self.sampled += len(tokens)
  + self.sampled = len(self.sampled) * [False] + len(tokens)
grpo_tools.Trajectory.add: every token counts as sampled (trap 52)
  math/test_tools.py::test_sampled_marks_what_the_policy_wrote
  - [logprobs is not None]
  + [True]
grpo_tools.Trajectory.add: the end of a turn is not learned (trap 57)
  math/test_tools.py::test_earlier_messages_are_not_trained
  - self.sampled += len(tokens) * [logprobs is not None]
  + self.sampled += [logprobs is not None and token != 2 for token in tokens]
grpo_tools.write_trajectories: a turn is tokenized again (trap 51)
  math/test_tools.py::test_no_turn_is_tokenized_again
  - x.add(tokens, logprobs)
  + x.add(turn_format.tokenizer(turn_format.tokenizer.decode(tokens)).input_ids, logprobs)
grpo_tools.write_trajectories: each turn begins with the same random numbers
  math/test_tools.py::test_a_turn_goes_on_after_the_result
  - x.uniforms[len(x.tokens) :]
  + x.uniforms[: len(x.uniforms) - len(x.tokens)]
grpo_tools.write_trajectories: each turn may be as long as a trajectory
  math/test_tools.py::test_a_result_must_leave_room_for_a_token
  - x.uniforms[len(x.tokens) :]
  + x.uniforms
grpo_tools.write_trajectories: a result may fill the trajectory (IndexError)
  math/test_tools.py::test_a_result_must_leave_room_for_a_token
  - >= T
  + > T
grpo_tools.write_trajectories: a result needs no room (IndexError)
  math/test_tools.py::test_a_result_must_leave_room_for_a_token
  - elif len(x.tokens) + len(tokens) >= T:
  + elif False:
grpo_tools.write_trajectories: a result that no turn will read is appended
  math/test_tools.py::test_the_last_turn
  - x.num_turns == args.max_turns
  + x.num_turns > args.max_turns
grpo_tools.write_trajectories: a turn with a call counts as an answer
  math/test_tools.py::test_the_last_turn
  - x.end = "no_turn"
  + x.end = "answer"
grpo_tools.write_trajectories: an answer that was cut off counts as one
  math/test_tools.py::test_a_turn_that_is_cut_off
  - if not is_complete:
  + if False:
grpo_tools.write_trajectories: the calls of a turn with another end are made (trap 57)
  math/test_tools.py::test_a_call_that_another_stop_token_ends
  - tokens[-1] == turn_format.end
  + True
grpo_tools.write_trajectories: a call that was not finished is an answer
  math/test_tools.py::test_why_a_trajectory_ends[unfinished_call]
  - turn_format.has_open_call(text)
  + False
grpo_tools.write_trajectories: what an environment says first is lost
  math/test_tools.py::test_an_environment_speaks_first
  - if text:
  + if False:
grpo_tools.write_trajectories: siblings read what the environment says to the first
  math/test_tools.py::test_siblings_may_begin_with_different_texts
  - if all(text == texts[i // k * k] for i, text in enumerate(texts)):
  + if True:
grpo_tools.write_trajectories: an environment cannot end a trajectory
  math/test_tools.py::test_an_environment_ends_a_trajectory
  - if is_over:
  + if False:
grpo_tools.write_trajectories: the policy does not read the results (trap 53)
  math/test_tools.py::test_a_turn_goes_on_after_the_result
  - x.example["ids"] + x.tokens for
  + x.example["ids"] + [t for t, written in zip(x.tokens, x.sampled) if written] for
grpo_tools.write_trajectories: the results count as sampled (trap 52)
  math/test_tools.py::test_sampled_marks_what_the_policy_wrote
  - x.add(tokens)
  + x.add(tokens, len(tokens) * [0.0])
grpo_tools.write_trajectories: results are not cut (IndexError)
  math/test_tools.py::test_a_long_result_is_cut
  - message["content"] = turn_format.text_of_result(message["content"], args.max_tool_tokens)
  + pass
grpo_tools.write_trajectories: rewards do not see the results
  math/test_tools.py::test_a_turn_goes_on_after_the_result
  - x.messages += messages
  + pass
grpo_tools.sample_turns: texts read their padding (trap 54)
  math/test_tools.py::test_a_turn_does_not_depend_on_the_other_texts
  - padding_value=-1
  + padding_value=0
grpo_tools.sample_turns: a text that begins with token 0 begins with padding (trap 54)
  math/test_tools.py::test_a_turn_does_not_depend_on_the_other_texts
  - ids >= 0
  + ids > 0
grpo_tools.sample_turns: a turn is longer than its random numbers
  math/test_tools.py::test_a_turn_does_not_depend_on_the_other_texts
  - end = min(length, len(row_uniforms))
  + end = length
grpo_tools.sample_turns: the temperature of a turn is forgotten (trap 11)
  math/test_tools.py::test_a_turn_does_not_depend_on_the_other_texts
  - stop_ids, args.temperature)
  + stop_ids, 1.0)
grpo_tools.call_tools: a turn has one call
  math/test_tools.py::test_what_counts_as_failed
  - x.num_calls += 1
  + x.num_calls = 1
grpo_tools.call_tools: each result with the word error is a failure
  math/test_tools.py::test_what_counts_as_failed
  - result.startswith("error: ")
  + "error: " in result
grpo_tools.call_tools: a missing result is no failure
  math/test_tools.py::test_a_result_that_comes_too_late_is_dropped
  - f"error: no result
  + f"no result
grpo_tools.call_tools: tools run one after the other
  math/test_tools.py::test_tools_run_in_parallel_and_one_that_hangs_ends_in_an_error
  - x.worker.submit(run_call
  + trajectories[0].worker.submit(run_call
grpo_tools.run_call: an environment is used while a call still runs
  math/test_tools.py::test_an_environment_is_left_after_a_call_that_hangs
  - if x.environment is not None and x.num_timeouts:
  + if False:
grpo_tools.run_call: a tool can end the run (SystemExit)
  math/test_tools.py::test_a_tool_cannot_end_the_run
  - except BaseException
  + except Exception
grpo_tools.run_call: the policy reads what an async tool is
  math/test_tools.py::test_async_tools
  - finished(function(**call["arguments"]))
  + function(**call["arguments"])
grpo_tools.run_call: wrong arguments are an error of the tool
  math/test_tools.py::test_what_the_policy_writes_wrongly_becomes_the_result
  - inspect.signature(function).bind(
  + (lambda **arguments: 0)(
grpo_tools.Trajectory.ask: an environment is rewarded while a call still runs
  math/test_tools.py::test_an_environment_is_left_after_a_call_that_hangs
  - if self.num_timeouts or not hasattr
  + if not hasattr
grpo_tools.Worker.work: a tool does not find the event loop of its thread (trap 60)
  math/test_tools.py::test_async_tools
  - asyncio.set_event_loop(loop)
  + pass
grpo_tools.is_in_time: a result that comes too late is one (trap 60)
  math/test_tools.py::test_a_call_that_lets_no_other_thread_run
  - return job.seconds <= timeout
  + return True
grpo_tools.Worker.replace_thread: an endless loop goes on
  math/test_tools.py::test_an_endless_loop_is_ended
  - PyThreadState_SetAsyncExc(thread, error)
  + PyThreadState_SetAsyncExc(None, error)
grpo_tools.Worker.work: a thread goes on after a job that was cancelled
  math/test_tools.py::test_a_thread_that_was_left_ends
  - return  # a new thread goes on
  + continue
grpo_tools.TurnFormat.read_turn: only the first call of a turn is made
  math/test_tool_formats.py::test_calls_in_a_turn
  - [call for call in calls if call is not None]
  + [call for call in calls if call is not None][:1]
grpo_tools.TurnFormat.read_turn: a call without anything is none
  math/test_tool_formats.py::test_calls_in_a_turn
  - if call is not None]
  + if call]
grpo_tools.TurnFormat.read_turn: a call in a thought that the template opens is made (trap 58)
  math/test_tool_formats.py::test_a_call_that_is_only_thought_about
  - finditer(self.header + text)
  + finditer(text)
grpo_tools.TurnFormat.read_turn: transformers does not know where a turn begins (trap 58)
  math/test_tool_formats.py::test_a_call_that_is_only_thought_about
  - prefix=self.header
  + prefix=""
grpo_tools.TurnFormat.read_turn: transformers does not know what is a number (trap 58)
  math/test_tool_formats.py::test_calls_as_the_model_describes_them
  - tools=self.schemas
  + tools=None
grpo_tools.TurnFormat.read_turn: a broken call is none, and the turn an answer (trap 58, ValueError)
  math/test_tool_formats.py::test_a_broken_call_as_the_model_describes_it
  - calls = [f"{type(error).__name__}: {error}"]
  + calls = [f"{type(error).__name__}: {error}"][:0]
grpo_tools.TurnFormat.read_turn: the end of a turn is part of its text
  math/test_tools.py::test_a_turn_goes_on_after_the_result
  - tokens[:-1] if is_complete else tokens
  + tokens
grpo_tools.TurnFormat.has_open_call: a call in a thought is not finished
  math/test_tool_formats.py::test_a_call_that_is_not_finished
  - THOUGHT_OR_CALL.sub("", self.header + text)
  + re.sub("<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
grpo_tools.TurnFormat.text_of_result: the end of a result is kept
  math/test_tool_formats.py::test_a_long_result_is_cut_between_characters
  - ids[:max_tokens]
  + ids[-max_tokens:]
grpo_tools.TurnFormat.text_of_result: a result is cut within a character (trap 59)
  math/test_tool_formats.py::test_a_long_result_is_cut_between_characters
  - .rstrip("\ufffd")
  + .rstrip("")
grpo_tools.TurnFormat.text_of_result: a result ends its message (trap 59)
  math/test_tool_formats.py::test_a_result_ends_no_turn
  - match[0][0] + " " + match[0][1:]
  + match[0]
grpo_tools.TurnFormat.__init__: a result closes the tag around it (trap 59)
  math/test_tool_formats.py::test_a_tag_of_the_template_in_a_result
  - if is_special or text in str(tokenizer.chat_template)]
  + if is_special]
grpo_tools.TurnFormat.after_turn: the end of a turn is there twice (trap 57)
  math/test_tools.py::test_a_turn_goes_on_after_the_result
  - self.ids_after_text(messages)[1:]
  + self.ids_after_text(messages)
check.turn_faults: a turn may end with a token that does not stop it (trap 57)
  check/test_check_rewards.py::test_turns_that_cannot_be_told_apart
  - turn_format.end not in x.stop_ids
  + False
check.turn_faults: a template may leave out the results
  check/test_check_rewards.py::test_turns_that_cannot_be_told_apart
  - turn_format.after_turn([result_of("1")]) == turn_format.after_turn([result_of("2")])
  + False
check.check_begun_answers: a begun answer that is empty
  check/test_check_chats.py::test_a_begun_answer_that_is_empty[grpo_math-]
  - is_blank(chat[-1].get("content"))
  + False
check.check_end_of_answers: a template that writes nothing after an answer
  check/test_check_chats.py::test_templates_that_end_answers_otherwise
  - if not places:
  + if end and not places:
check.returns_nothing: a tool that prints its result
  check/test_check_rewards.py::test_tools[printing]
  - return not any(
  + return False and not any(
check.lists_only: the keys of a mapping are rewards
  check/test_check_rewards.py::test_wrong_rewards[a mapping]
  - (Mapping, Set, str, bytes)
  + (Set, str)
check.changes: state of the class, which all objects share
  check/test_check_rewards.py::test_calls_of_an_environment[shared]
  - before[place] != after.get(place)
  + False
grpo_tools.run_call: a call that is refused after a time-out is an error of the tool
  math/test_tools.py::test_an_environment_is_left_after_a_call_that_hangs
  -         if x.environment is not None and x.num_timeouts:
  -             raise TimeoutError("an earlier call did not end in time")
  -         is_error = True  # from here, an exception is one of the tool
  +         is_error = True  # from here, an exception is one of the tool
  +         if x.environment is not None and x.num_timeouts:
  +             raise TimeoutError("an earlier call did not end in time")
check.check_environment: what reset changes in the class is read too late
  check/test_check_rewards.py::test_a_reset_that_changes_all_objects
  -         before = shared_values(one)
  -         beginnings += start_tools([other])
  +         beginnings += start_tools([other])
  +         before = shared_values(one)
check.result_faults: an environment whose calls all fail
  check/test_check_rewards.py::test_calls_of_an_environment[always fails]
  - if not results:
  + if False:
check.sharing_faults: a board of the module, which all objects share
  check/test_check_tool_calls.py::test_state_that_objects_share[of the module]
  - if (place, name) in unclear and not is_seen:
  + if (place, name) in unclear:
check.result_faults: a connection of the thread that imported a tool
  check/test_check_tool_calls.py::test_what_counts_in_the_thread_of_the_import[a connection]
  - OTHER_THREAD.search(str(problem))
  + False
check.result_faults: a result that has no text
  check/test_check_tool_calls.py::test_what_no_policy_can_read[map]
  - UNREADABLE.fullmatch(str(result))
  + False
check.watched_process: a redirected output in a helper
  check/test_check_tool_calls.py::test_what_holds_for_all_threads[in a helper]
  - threading.current_thread() is not threading.main_thread()
  + False
check.check_last_turn: a reward that reads the call instead of the answer
  check/test_check_tool_calls.py::test_a_reward_that_reads_the_first_message[first]
  - if name not in reads_last:
  + if name in reads_last:
check.check_last_turn: a reward that searches the results is refused
  check/test_check_tool_calls.py::test_a_reward_that_reads_the_first_message[grounded]
  - (["nothing found"] * len(rows), answers)
  + (["nothing found"] * len(rows),)
check.pair_faults: a template that writes one of two results
  check/test_check_tool_calls.py::test_results_of_two_calls[one result]
  - pairs[0] in pairs[1:]
  + pairs[0] in pairs[3:]
check.nested_faults: a list that is read back as a text
  check/test_check_tool_calls.py::test_lists_and_dicts_as_arguments[Python-array]
  - if kind not in kinds:
  + if kind in kinds:
check.check_written_messages: a message of a developer that no template writes
  check/test_check_chats.py::test_a_message_that_the_template_leaves_out[developer-sft]
  - MARKER not in text
  + MARKER in text
play.play: the options of the chat template
  runs/test_play.py::test_the_options_of_the_template
  - set_template_options(tokenizer, args)
  + UserError()
check.own_surplus: shuffled responses
  check/test_check_data.py::test_responses_of_other_prompts[rejected]
  - others = prompts[half:] + prompts[:half]
  + others = prompts
check.check_control_tokens: control tokens in a user's message are not counted (trap 59)
  check/test_check_chats.py::test_control_tokens_in_a_text
  - str(message.get("content"))
  + ""
check.check_kept_rows: rows of --hard-dataset-name are not looked at
  check/test_check_rewards.py::test_harder_rows
  - ("train", "held-out", "harder")
  + ("train", "held-out")
check.reversed_sentiments: names of labels in the wrong order
  check/test_check_data.py::test_names_of_labels_in_the_wrong_order[positive,negative-True]
  - means["negative"] - means["positive"] >
  + means["positive"] - means["negative"] >
check.check_tool_format: a template may change a turn (ValueError)
  check/test_check_rewards.py::test_turns_that_cannot_be_told_apart
  - text.count(x.script.MARK) != 1
  + False
check.failures_with: calls need not be read back (trap 58, ValueError)
  check/test_tool_templates.py::test_a_template_that_is_refused
  - calls_in(x, turn_format, turn) == [expected]
  + calls_in(x, turn_format, turn) or True
check.failures_with: something else may follow a call (trap 58, ValueError)
  check/test_tool_templates.py::test_a_template_that_is_refused
  - if not text.endswith(end):
  + if False:
check.check_known_tools: nobody need know the tools (trap 58)
  check/test_tool_templates.py::test_a_template_that_is_refused
  - if unknown:
  + if False:
check.check_known_tools: a word of the template's code names a tool (trap 58)
  check/test_tool_templates.py::test_tools_that_fine_tuning_taught
  - re.findall(r"\{#.*?#\}", template, re.DOTALL)
  + [template]
check.check_calls: arguments may be a JSON text in quotes (trap 48, ValueError)
  data/test_chats.py::test_arguments_as_a_json_text
  - rendered(x, row, chat) != rendered(x, row, loaded)
  + False
sft.chat_document: the template does not show the tools (trap 48)
  data/test_chats.py::test_what_is_learned_of_a_chat_with_tools
  - partial(render_chat, tokenizer, schemas=schemas)
  + partial(render_chat, tokenizer)
grpo_tools.TurnFormat.ids_after_text: each result is a message to the policy by itself
  data/test_chats.py::test_results_of_tools_are_those_of_the_template
  - *messages]
  + *messages[:1]]
check.check_held_out: held-out rows with the same prompt are training rows
  check/test_check_data.py::test_training_rows_that_are_held_out
  - repr(row) in rows for row
  + key_of(row) in train for row
check.play: calls go on after one that takes too long
  check/test_check_tool_calls.py::test_a_call_that_takes_too_long_is_the_last
  - end - time.time()
  + 9.0
check.environment_faults: the tools of a recipe may stay beside an environment
  check/test_check_rewards.py::test_an_environment_beside_a_recipe
  - (recipe.tools, recipe.dataset_name) == (x.args.tools, x.args.dataset_name)
  + False
check.method_faults: a tool may have the name of a method that the script calls
  check/test_check_rewards.py::test_broken_environments[a tool called reply]
  - if job.exception() is not None:
  + if False:
check.own_modules: a file next to the script is not forgotten
  check/test_check_tool_calls.py::test_a_file_in_a_folder_that_python_knows
  - Counter(sys.path) - Counter(path)
  + {*sys.path} - {*path}
grpo_tools.load_tools: the policy can ask for its reward
  math/test_tools.py::test_the_tools_of_an_environment
  - name not in OWN_METHODS
  + name != "reset"
grpo_tools.load_tools: an environment hides the functions of --tools
  math/test_tools.py::test_the_tools_of_an_environment
  - x.tools = functions | {
  + x.tools = {
grpo_tools.load_tools: private methods are tools
  math/test_tools.py::test_the_tools_of_an_environment
  - if not name.startswith("_")
  + if not name.startswith("__")
grpo_tools.load_tools: the trajectories of a task share an environment
  math/test_tools.py::test_each_trajectory_has_its_own_environment
  - x.environment = make_environment()
  + x.environment = start.shared = getattr(start, "shared", None) or make_environment()
grpo_tools.load_tools: an environment is made in another thread (trap 60, ProgrammingError)
  math/test_tools.py::test_an_environment_lives_in_one_thread
  - jobs = [x.worker.submit(start, x) for x in trajectories]
  + jobs = [Worker().submit(start, x) for x in trajectories]
grpo_tools.load_tools: properties of an environment are read (OSError)
  math/test_tools.py::test_the_tools_of_an_environment
  - inspect.getmembers(make_environment,
  + inspect.getmembers(make_environment(),
grpo_tools.load_tools: reset changes the columns that siblings and rewards read
  math/test_tools.py::test_reset_gets_a_copy_of_the_columns
  - copy.deepcopy(x.example["columns"])
  + x.example["columns"]
grpo_tools.load_tools: what reset returns is lost
  math/test_tools.py::test_reset_gets_a_copy_of_the_columns
  - [job.result() for job in jobs]
  + [job.result() and None for job in jobs]
grpo_tools.load_prompts: a prompt that is a text has no tools
  math/test_tools.py::test_a_text_is_a_message_of_the_user
  - and not is_chat(row["prompt"]):
  + and False:
grpo_tools.score_trajectories: --reward-fn hides the reward of the environment (KeyError)
  math/test_tools.py::test_each_trajectory_has_its_own_environment
  - if hasattr(environments[0], "get_reward"):
  + if not functions and hasattr(environments[0], "get_reward"):
grpo_tools.score_trajectories: rewards see the last message only
  math/test_tools.py::test_each_trajectory_has_its_own_environment
  - [x.messages for x in trajectories]
  + [x.messages[-1:] for x in trajectories]
grpo_tools.score_trajectories: rewards get the environment of another trajectory
  math/test_tools.py::test_each_trajectory_has_its_own_environment
  - [x.environment for x
  + [trajectories[-1].environment for x
grpo_tools.score_trajectories: environments are copied (TypeError)
  math/test_tools.py::test_each_trajectory_has_its_own_environment
  - [x.example["columns"] for x in trajectories]
  + [x.example["columns"] | {"environments": x.environment} for x in trajectories]

# vLLM

examples/vllm_rollout.generate: a seed for each response, which fails on a CPU
  runs/test_vllm_rollout.py::test_it_takes_and_returns_what_the_scripts_do
  - seed=None if on_cpu else seed
  + seed=seed
examples/vllm_rollout.generate: vLLM moves the generator that reward functions draw from
  runs/test_vllm_rollout.py::test_it_takes_and_returns_what_the_scripts_do
  - fork_rng(enabled=on_cpu)
  + fork_rng(enabled=False)
examples/vllm_rollout.generate: a response that vLLM cut is filled up with zeros
  runs/test_vllm_rollout.py::test_a_response_that_vllm_cuts_is_refused
  - assert ended,
  + assert True,
examples/vllm_rollout.load_weights: keys and values of the old weights are used again
  runs/test_vllm_rollout.py::test_it_takes_and_returns_what_the_scripts_do
  - engine.reset_prefix_cache()
  + pass
examples/vllm_rollout.load_weights: the weights are given to the engine only once
  runs/test_vllm_rollout.py::test_a_run_with_the_diff[grpo_math]
  - engine.collective_rpc(
  + vars(engine).setdefault("has_weights", 0) or vars(engine).update(has_weights=1) or engine.collective_rpc(
examples/vllm_rollout.stop: vLLM and accelerate close the same process group
  runs/test_vllm_rollout.py::test_a_run_with_the_diff[grpo_math]
  - engine.llm_engine.engine_core.shutdown()
  + pass
"""

# What is indented belongs to the headline above it.
blocks = re.findall(r"^[^\s#].*(?:\n  .*)+", TABLE, re.MULTILINE)
FAULTS = [read(block) for block in blocks]
