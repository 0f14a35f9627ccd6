#!/bin/bash
# RL on real pretrained models and real data: one job from nothing to its evaluation.
#
#   bash benchmarks/real_models.sh JOB SEED MODELS DATA OUT        (PYTHON=... chooses another Python)
#
#   JOB      qwen-gsm8k: school mathematics on one GPU with 80 GB, grpo_math.py
#            smollm2-imdb: positive film reviews, ppo_sentiment.py
#            smollm2-dailydialog: answers in dialogs, ppo_dialog.py
#            smollm2-word-problems: word problems with answers that are checked, grpo_math.py
#            smollm2-tldr: summaries of posts, rloo_tldr.py
#            smollm2-hh: helpful and harmless answers, rloo_tldr.py
#   SEED     of the RL run; the stages before it are made once, with seed 1, and serve all seeds
#   MODELS   a folder with smollm2-135m-instruct and minilm-l6:
#              hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir MODELS/smollm2-135m-instruct
#              hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir MODELS/minilm-l6
#            for qwen-gsm8k only qwen2.5-coder-0.5b-instruct:
#              hf download Qwen/Qwen2.5-Coder-0.5B-Instruct --local-dir MODELS/qwen2.5-coder-0.5b-instruct
#   DATA     a folder of raw data sets: see real_data.py
#   OUT      output directory: 5 GB
#
# Run the same command again after an interruption: finished stages are skipped, an unfinished one is resumed.
# More flags for the RL run can follow OUT. One core: OMP_NUM_THREADS=1. ONLY=reward runs only the stage with this
# folder, so that stages that do not need each other can run side by side. Results: docs/real_models.md.
set -eu
[ $# -ge 5 ] || { sed -n '2,24s/^# \?//p' "$0"; exit 2; }
JOB=$1 SEED=$2 MODELS=$(realpath "$3") DATA=$(realpath "$4") OUT=$5
shift 5
HERE=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python}
mkdir -p "$OUT"
cd "$OUT"
ln -sfn "$MODELS" models

# stage FOLDER SCRIPT FLAGS...: run a script of the project, unless it is finished
stage() {
    local folder=$1 script=$2
    shift 2
    [ "${ONLY:-$folder}" = "$folder" ] || return 0
    if [ -e "$folder/finished" ]; then
        echo "$folder: finished"
    elif [ -e "$folder/args.json" ]; then
        "$PYTHON" "$HERE/$script" --resume "$folder"
    else
        "$PYTHON" "$HERE/$script" "$@" --output-dir "$folder"
    fi
    touch "$folder/finished"
}

case $JOB in
qwen-gsm8k)
    [ -e gsm8k/test.jsonl ] || "$PYTHON" "$HERE/benchmarks/real_data.py" "$JOB" "$DATA" .
    # All test problems, with four samples each. The evaluation answers 1,024 prompts at once.
    stage "grpo-seed$SEED" grpo_math.py gsm8k-qwen-0.5b --seed "$SEED" --dataset-name gsm8k \
        --model-name-or-path models/qwen2.5-coder-0.5b-instruct \
        --system-prompt 'Think step by step, and put your final answer within \boxed{}.' \
        --num-eval-prompts 1319 --num-eval-samples 4 --local-rollout-forward-batch-size 1024 --keep-checkpoints 1 "$@"
    ;;
smollm2-imdb)
    [ -e imdb-judge/test.jsonl ] || "$PYTHON" "$HERE/benchmarks/real_data.py" "$JOB" "$DATA" .
    # The start: SmolLM2 on 3,000 beginnings of reviews.
    stage sft sft.py smollm2-imdb --model-name-or-path models/smollm2-135m-instruct --dataset-name imdb \
        --dtype bfloat16 --save-every 20 --keep-checkpoints 1
    # The reward: MiniLM as a classifier, on 12,500 reviews of IMDB's training half.
    stage reward reward_model.py smollm2-imdb --model-name-or-path models/minilm-l6 --dataset-name imdb \
        --label-names negative,positive --save-every 100 --keep-checkpoints 1
    # The judge: another architecture with random weights, on the other half of IMDB. (The published one was
    # trained with dropout.)
    [ -e judge-start/config.json ] || "$PYTHON" - <<'EOT'
from transformers import AutoTokenizer, DistilBertConfig, DistilBertForSequenceClassification

tokenizer = AutoTokenizer.from_pretrained("models/minilm-l6")
config = DistilBertConfig(vocab_size=len(tokenizer), dim=96, n_layers=1, n_heads=4, hidden_dim=192)
DistilBertForSequenceClassification(config).save_pretrained("judge-start")
tokenizer.save_pretrained("judge-start")
EOT
    stage judge reward_model.py smollm2-imdb --model-name-or-path judge-start --dataset-name imdb-judge \
        --label-names negative,positive \
        --num-eval-prompts 5000 --num-train-epochs 3 --learning-rate 1e-3 --keep-checkpoints 1
    stage "ppo-seed$SEED" ppo_sentiment.py smollm2-imdb --seed "$SEED" --model-name-or-path sft/model \
        --reward-model-path reward/model --judge-model-path judge/model --dataset-name imdb \
        --dtype bfloat16 --save-every 4 "$@"
    ;;
smollm2-dailydialog)
    # The start: SmolLM2 on a quarter of the training dialogs.
    stage sft sft.py "$JOB" --model-name-or-path models/smollm2-135m-instruct --dataset-name "$DATA/daily_dialog" \
        --dtype bfloat16 --save-every 20 --keep-checkpoints 1
    # The intent: MiniLM as a classifier of dialog acts.
    stage intent reward_model.py "$JOB" --model-name-or-path models/minilm-l6 --dataset-name "$DATA/daily_dialog" \
        --label-names inform,question,directive,commissive --save-every 100 --keep-checkpoints 1
    stage "ppo-seed$SEED" ppo_dialog.py "$JOB" --seed "$SEED" --model-name-or-path sft/model \
        --reward-model-path intent/model --dataset-name "$DATA/daily_dialog" --dtype bfloat16 --save-every 4 "$@"
    ;;
smollm2-word-problems)
    [ -e word-problems/test.jsonl ] || "$PYTHON" "$HERE/benchmarks/real_data.py" "$JOB" "$DATA" .
    # The start: SmolLM2 on one half of the training problems, with their solutions.
    stage sft sft.py "$JOB" --model-name-or-path models/smollm2-135m-instruct --dataset-name word-problems-sft \
        --dtype bfloat16 --save-every 20 --keep-checkpoints 1
    # GRPO on the other half, with their answers only.
    stage "grpo-seed$SEED" grpo_math.py "$JOB" --seed "$SEED" --model-name-or-path sft/model \
        --dataset-name word-problems --dtype bfloat16 --save-every 4 --keep-checkpoints 1 "$@"
    ;;
smollm2-tldr)
    # The start: SmolLM2 on 1,400 posts with their TL;DR.
    stage sft sft.py --model-name-or-path models/smollm2-135m-instruct --dataset-name "$DATA/tldr" --max-length 640 \
        --num-train-epochs 2 --lr-scheduler-type cosine --warmup-ratio 0.05 --dtype bfloat16 --save-every 20
    # The reward and the judge: each learns from its half of 710 pairs.
    for half in "0/2 reward" "1/2 judge"; do
        stage "${half#* }" reward_model.py --train-shard "${half% *}" --model-name-or-path sft/model \
            --dataset-name "$DATA/tldr_preference" --center-dataset-name "$DATA/tldr" --max-length 640 \
            --per-device-train-batch-size 8 --warmup-ratio 0.1 --dtype bfloat16
    done
    stage "rloo-seed$SEED" rloo_tldr.py --seed "$SEED" --model-name-or-path sft/model --reward-model-path reward/model \
        --judge-model judge/model --dataset-name "$DATA/tldr" --total-episodes 10240 --rloo-k 4 --num-ppo-epochs 2 \
        --num-mini-batches 2 --per-device-train-batch-size 16 --gradient-accumulation-steps 8 --kl-coef 0.03 \
        --missing-eos-penalty 1.0 --learning-rate 1e-5 --adam-eps 1e-5 --dtype bfloat16 --save-every 4 "$@"
    ;;
smollm2-hh)
    [ -e hh/test.jsonl ] || "$PYTHON" "$HERE/benchmarks/real_data.py" "$JOB" "$DATA" .
    # The reward and the judge: each learns from its half of the pairs.
    for half in "0/2 reward" "1/2 judge"; do
        stage "${half#* }" reward_model.py --train-shard "${half% *}" --model-name-or-path models/smollm2-135m-instruct \
            --dataset-name hh --max-length 512 --per-device-train-batch-size 8 --num-train-epochs 1 \
            --warmup-ratio 0.1 --dtype bfloat16
    done
    stage "rloo-seed$SEED" rloo_tldr.py --seed "$SEED" --model-name-or-path models/smollm2-135m-instruct \
        --reward-model-path reward/model --judge-model judge/model --dataset-name hh --max-prompt-length 256 \
        --response-length 64 --temperature 1.0 --total-episodes 10240 --rloo-k 4 --num-ppo-epochs 2 \
        --num-mini-batches 2 --per-device-train-batch-size 16 --gradient-accumulation-steps 8 --kl-coef 0.03 \
        --missing-eos-penalty 1.0 --learning-rate 1e-5 --adam-eps 1e-5 --dtype bfloat16 --save-every 4 "$@"
    ;;
*)
    echo "no job $JOB" >&2
    exit 2
    ;;
esac
