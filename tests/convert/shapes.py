"""Commands in the forms of the peers' examples."""

SWIFT = """
# colocated vLLM, LoRA, several updates of a rollout
MAX_PIXELS=1003520 NPROC_PER_NODE=8 \\
swift rlhf \\
    --rlhf_type grpo \\
    --model Qwen/Qwen2.5-VL-7B-Instruct \\
    --external_plugins plugin.py \\
    --reward_funcs external_count format \\
    --reward_weights 1 0.5 \\
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 --vllm_tensor_parallel_size 2 \\
    --tuner_type lora --lora_rank 16 --lora_alpha 64 --lora_dropout 0.05 \\
    --torch_dtype bfloat16 \\
    --dataset 'rows.jsonl#1000' \\
    --max_length 4096 --max_completion_length 1024 \\
    --num_train_epochs 1 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 4 \\
    --learning_rate 1e-5 \\
    --num_generations 8 --temperature 1.0 --top_p 1.0 \\
    --beta 0.001 --loss_type dapo --epsilon 0.2 --epsilon_high 0.28 \\
    --dynamic_sample true --max_resample_times 5 --overlong_filter true \\
    --advantage_estimator reinforce_plus_plus --kl_in_reward true \\
    --deepspeed zero3 --save_steps 100 --logging_steps 5 --save_total_limit 2 \\
    --warmup_ratio 0.05 --attn_impl flash_attn --report_to wandb \\
    --output_dir output/grpo --no_such_flag 3
"""

SWIFT_FULL = """
CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 WANDB_API_KEY=xxx NCCL_DEBUG=INFO \\
swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-VL-72B-Instruct --tuner_type full \\
    --dataset org/charts#500 --load_from_cache_file true --reward_funcs accuracy format \\
    --use_vllm true --vllm_mode colocate --vllm_max_model_len 8192 --sleep_level 1 --async_generate false \\
    --deepspeed zero3_offload --move_model_batches 40 --offload_optimizer true --offload_model true \\
    --system prompts/think.txt --log_completions true --num_iterations 2 --top_k 80 --eval_steps 1000 \\
    --output_dir output/a-rather-long-name-of-a-run-that-reaches-the-column-of-comments-2026-06-01
"""

SWIFT_SFT = """
nproc_per_node=2
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \\
NPROC_PER_NODE=$nproc_per_node \\
IMAGE_MAX_TOKEN_NUM=1024 VIDEO_MAX_PIXELS=50176 FPS_MAX_FRAMES=12 FPS=1 \\
swift sft \\
    --model Qwen/Qwen3-VL-4B-Instruct \\
    --dataset 'org/ocr:human#5000' \\
              'org/chat#10000' \\
    --split_dataset_ratio 0.01 --eval_steps 100 \\
    --tuner_type lora --target_modules all-linear --freeze_vit true --freeze_aligner true \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) --per_device_train_batch_size 1 \\
    --gradient_checkpointing true --vit_gradient_checkpointing false \\
    --dataset_num_proc 64 --dataloader_num_workers 4 --max_length 2048 --warmup_ratio 0.05 \\
    --report_to tensorboard swanlab --eval_strategy steps --learning_rate 1e-4
"""

SWIFT_LORA_LLM = """
NPROC_PER_NODE=4 swift sft --model org/vl --dataset rows.jsonl --tuner_type lora_llm --lora_rank 16 \\
    --vit_lr 1e-5 --aligner_lr 2e-5 --learning_rate 1e-4 --deepspeed zero2 --save_only_model true
"""

SWIFT_ARRAY = """
ARGS=(--model org/vl --dataset "my rows.jsonl")
ARGS+=(--learning_rate "${LR:-3e-5}")
export MASTER_PORT=29900
N=4
swift rlhf --rlhf_type grpo "${ARGS[@]}" --reward_funcs format --per_device_train_batch_size $((16 / N)) \\
    --gradient_accumulation_steps `expr $N / 2` --max_new_tokens 300 --output_dir "runs/$(date +%F)" 2>&1 | tee log.txt
"""

VLM_R1 = """
PROJECT_ROOT="$( cd "$( dirname "${BASH_SOURCE[0]}" )/.." && pwd )"
export REPO_HOME="${PROJECT_ROOT}" # where the code is
data_paths="refcoco.jsonl:refcocop.jsonl"
image_folders="coco:coco"
is_reward_customized_from_vlm_module=True
export RUN_NAME="qwen-rec-lora"
export DEBUG_MODE="true"
torchrun --nproc_per_node="8" --nnodes="1" --node_rank="0" --master_addr="127.0.0.1" --master_port="12349" \\
  src/open_r1/grpo_jsonl.py \\
    --use_vllm False \\
    --output_dir ${REPO_HOME}/checkpoints/$RUN_NAME \\
    --resume_from_checkpoint True \\
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \\
    --data_file_paths $data_paths \\
    --image_folders $image_folders \\
    --is_reward_customized_from_vlm_module $is_reward_customized_from_vlm_module --task_type rec \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --num_generations 8 \\
    --max_completion_length 2048 --beta 0.04 --bf16 --max_anyres_num 6 \\
    --max_steps 600 --save_steps 100 --learning_rate 1e-5 --run_name ${RUN_NAME} \\
    --use_peft true --lora_dropout 0.05 --dataset-name this_is_not_used \\
    --reward_funcs accuracy format --freeze_vision_modules true --report_to wandb \\
    --deepspeed ${REPO_HOME}/local_scripts/zero3.json \\

echo "Training completed for ${RUN_NAME}"
"""

TRL = """
accelerate launch --num_processes 4 examples/grpo_script.py \\
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \\
    --dataset_name rows.jsonl \\
    --learning_rate 1e-5 --max_steps 200 --warmup_ratio 0.1 \\
    --gradient_accumulation_steps 2 --per_device_train_batch_size 4 --num_generations 4 \\
    --use_peft --lora_target_modules "q_proj", "v_proj" \\
    --loss_type cispo --epsilon_high 5.0 --importance_sampling_level token \\
    --scale_rewards false --num_iterations 2 --mask_truncated_completions true \\
    --use_vllm --vllm_mode server --vllm_server_port 8001 \\
    --reward_funcs think_format_reward
"""

TRL_EXAMPLE = """
accelerate launch --config_file configs/deepspeed_zero3.yaml examples/scripts/gspo_vlm.py \\
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --output_dir gspo --dtype bfloat16 \\
    --use_peft --lora_target_modules "q_proj", "v_proj" --log_completions \\
    --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 --steps_per_generation 8
"""

TRL_RLOO = "trl rloo --model_name_or_path org/vl --dataset_name rows.jsonl --reward_funcs accuracy_reward --use_vllm"

TRL_SFT = """
trl sft --model_name_or_path org/vl --dataset_name org/mix --dataset_train_split test --eval_strategy steps \\
    --eval_steps 20 --use_peft --lora_target_modules all-linear --attn_implementation eager --hub_token hf_SECRET
"""

SWIFT_MPO = """
# pairs, full fine-tuning, three losses
nproc_per_node=4
MAX_PIXELS=1003520 NPROC_PER_NODE=$nproc_per_node \\
swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-VL-7B-Instruct --dataset 'org/RLAIF-V#20000' --tuner_type full \\
    --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0 --rpo_alpha 0.0 --label_smoothing 0.1 \\
    --freeze_vit true --freeze_aligner true --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --deepspeed zero3 --max_length 9000 --warmup_ratio 0.05 --learning_rate 1e-5 --precompute_ref_log_probs false
"""

SWIFT_KTO = """
NPROC_PER_NODE=2 swift rlhf --rlhf_type kto --model org/vl --dataset rows.jsonl --tuner_type lora --lora_rank 8 \\
    --beta 0.2 --desirable_weight 1.5 --undesirable_weight 0.5 --deepspeed zero2 --loss_scale last_round \\
    --adapters sft/checkpoint-100 --ref_adapters sft/checkpoint-100
"""

SWIFT_GKD = """
NPROC_PER_NODE=4 swift rlhf --rlhf_type gkd --model OpenGVLab/InternVL3-2B --teacher_model OpenGVLab/InternVL3-8B \\
    --dataset 'org/captions#2000' --tuner_type lora --use_vllm true --vllm_mode colocate --lmbda 0.75 --beta 0.1 \\
    --gkd_logits_topk 64 --sft_alpha 0.1 --teacher_deepspeed zero3 --offload_teacher_model true --temperature 1.0 \\
    --per_device_train_batch_size 4 --max_completion_length 1024 --split_dataset_ratio 0.01 --eval_steps 50
"""

SWIFT_RM = """
swift rlhf --rlhf_type rm --model org/vl --dataset rows.jsonl --center_rewards_coefficient 0.01 --num_labels 1 \\
    --tuner_type lora --torch_dtype bfloat16 --max_length 2048 --eval_strategy no
"""

TRL_DPO = """
accelerate launch examples/scripts/dpo_vlm.py --dataset_name org/rlaif-v --model_name_or_path org/vl \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 32 --dataset_num_proc 32 --output_dir dpo \\
    --dtype bfloat16 --use_peft --lora_target_modules all-linear --loss_type sigmoid_norm --beta 0.3 --ld_alpha 0.5
"""

TRL_GKD = """
python examples/scripts/gkd.py --model_name_or_path org/small --teacher_model_name_or_path org/large --use_peft \\
    --dataset_name org/chats --learning_rate 2e-5 --gradient_accumulation_steps 8 --output_dir gkd --lora_r 64 \\
    --max_new_tokens 256 --push_to_hub --no_remove_unused_columns --seq_kd false
"""

TRL_REWARD = """
trl reward --model_name_or_path org/small --dataset_name org/pairs --output_dir reward --max_length 2048 \\
    --eval_strategy steps --eval_steps 50 --use_peft --lora_task_type SEQ_CLS --center_rewards_coefficient 0.01
"""

LLAMA_FACTORY = """
CUDA_VISIBLE_DEVICES=0,1 FORCE_TORCHRUN=1 llamafactory-cli train --stage dpo --do_train --finetuning_type lora \\
    --model_name_or_path Qwen/Qwen3-VL-4B-Instruct --image_max_pixels 262144 --trust_remote_code true --lora_rank 8 \\
    --lora_target all --pref_beta 0.2 --pref_loss sigmoid --pref_ftx 0.5 --pref_bco_weight 0.25 --dataset a,b \\
    --max_samples 1000 --template qwen3_vl_nothink --cutoff_len 2048 --val_size 0.1 --eval_strategy steps \\
    --eval_steps 500 --output_dir saves/dpo --overwrite_output_dir --plot_loss --bf16 --report_to none \\
    --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --warmup_ratio 0.1 --ddp_timeout 180000000
"""

LLAMA_FACTORY_FULL = """
torchrun --nproc_per_node 8 src/train.py --stage kto --do_train true --finetuning_type full --bf16 true \\
    --model_name_or_path org/vl --dataset labels --kto_rejected_weight 0.5 --freeze_vision_tower false \\
    --disable_gradient_checkpointing true --disable_shuffling true --mask_history false \\
    --deepspeed examples/deepspeed/ds_z3_config.json --output_dir saves/kto
"""

SHAPES = {
    "ms-swift": SWIFT,
    "ms-swift full": SWIFT_FULL,
    "ms-swift sft": SWIFT_SFT,
    "ms-swift lora_llm": SWIFT_LORA_LLM,
    "ms-swift array": SWIFT_ARRAY,
    "VLM-R1": VLM_R1,
    "TRL": TRL,
    "TRL example": TRL_EXAMPLE,
    "TRL rloo": TRL_RLOO,
    "TRL sft": TRL_SFT,
    "ms-swift mpo": SWIFT_MPO,
    "ms-swift kto": SWIFT_KTO,
    "ms-swift gkd": SWIFT_GKD,
    "ms-swift rm": SWIFT_RM,
    "TRL dpo": TRL_DPO,
    "TRL gkd": TRL_GKD,
    "TRL reward": TRL_REWARD,
    "LLaMA-Factory": LLAMA_FACTORY,
    "LLaMA-Factory full": LLAMA_FACTORY_FULL,
}
