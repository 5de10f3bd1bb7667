"""Every field of a run's config with its one default.

A named config starts from these and changes what its experiment is about:

  from configs import common

  def get_config():
    config = common.get_config()
    config.trainer.lr = 3e-4
    return config

The config is locked: a misspelt field fails, with the nearest name. Only
`task.params`, `task.reward_params` and `trainer.reward_weights` are open, for
they hold whatever the task's source and reward take and return.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
  """Returns the defaults: a tiny random model that learns sums with dora."""
  config = config_dict.ConfigDict()
  config.seed = 0  # of params, prompts' order and every draw
  config.model = _model()
  config.tokenizer = _tokenizer()
  config.task = _task()
  config.cold_start = _cold_start()
  config.mesh = _mesh()
  config.generator = _generator()
  config.coordinator = _coordinator()
  config.trainer = _trainer()
  config.evaluation = _evaluation()
  config.checkpoint = _checkpoint()
  config.runtime = _runtime()
  config.lock()
  config.task.params.unlock()
  config.task.reward_params.unlock()
  config.trainer.reward_weights.unlock()
  return config


def _model() -> config_dict.ConfigDict:
  model = config_dict.ConfigDict()
  model.source = "random"  # "random" | "huggingface"
  model.folder = (
    ""  # huggingface: config.json and *.safetensors; sets the shape
  )
  # The shape, used where the source is "random".
  model.width = 128
  model.mlp_width = 384
  model.num_layers = 4
  model.num_heads = 4  # query heads
  model.num_kv_heads = 2
  model.head_width = 32
  model.rope_theta = 10_000.0  # base of the rotary frequencies
  model.norm_eps = 1e-6  # inside the RMS norms
  model.qk_norm = False  # RMS norm of queries and keys, as in Qwen3
  model.qkv_bias = False  # as in Qwen2
  model.tied_head = True  # the embedding is the output head too
  model.compute_dtype = "float32"  # of the training forward; or "bfloat16"
  return model


def _tokenizer() -> config_dict.ConfigDict:
  tokenizer = config_dict.ConfigDict()
  tokenizer.kind = "char"  # "char" | "huggingface"
  tokenizer.alphabet = "0123456789+= "  # char: each character is a token
  tokenizer.folder = ""  # huggingface: holds tokenizer.json
  tokenizer.stop_ids = ()  # token ids; () takes the tokenizer's own
  return tokenizer


def _task() -> config_dict.ConfigDict:
  task = config_dict.ConfigDict()
  # "reasoning_gym" | "jsonl" | "parquet" | "sums" | "reversal"
  task.source = "sums"
  task.name = ""  # reasoning_gym: the generator's name
  task.params = config_dict.ConfigDict()  # of the source; open to new fields
  task.path = ""  # jsonl, parquet: the file
  task.heldout_path = ""  # the file to hold prompts out from; "" takes path
  task.columns = config_dict.ConfigDict(
    {"question": "question", "answer": "answer"}
  )  # our name -> the file's; reasoning_gym: or a field of its metadata
  task.extract = (
    ""  # named function that cuts the answer out; "" takes it whole
  )
  task.size = 0  # reasoning_gym: problems to generate; files: at most, 0 = all
  task.seed = 0  # of generated problems and of the order of prompts
  task.template = "{question}"  # text that the policy continues
  task.few_shot = ""  # text before every question
  task.chat = False  # render by the tokenizer's chat template
  task.num_heldout = 0  # problems set aside for evaluation, never trained on
  task.num_epochs = 0  # passes over the problems; 0 = endless
  task.max_prompt_tokens = 32
  task.on_long_prompt = "error"  # "skip" | "error"
  task.shuffle = True  # anew in each epoch
  task.reward = "exact_match"  # registered name, or "package.module:function"
  task.reward_params = config_dict.ConfigDict()  # of the reward; open
  task.reward_workers = 1  # processes
  task.reward_timeout_s = 10.0  # of one score, from when a worker begins it
  task.reward_memory_gib = 8.0  # of address space, of each of these processes
  task.reward_network = False  # whether rewards may use the network
  # More tries for a completion without a reward, before it is quarantined.
  task.reward_retries = 1
  return task


def _cold_start() -> config_dict.ConfigDict:
  cold_start = config_dict.ConfigDict()
  cold_start.steps = 0  # supervised updates before version 0; 0 = none
  cold_start.batch_size = 64  # (prompt, completion) pairs an update
  cold_start.lr = 1e-3
  cold_start.wrong_share = 0.0  # of demonstrations that show another's answer
  cold_start.prefix = ""  # text between a prompt and its worked answer
  return cold_start


def _mesh() -> config_dict.ConfigDict:
  mesh = config_dict.ConfigDict()
  mesh.host_devices = 0  # CPU devices to make, on CPU only; 0 = leave
  mesh.trainer_fsdp = 1  # devices that share weights and rows
  mesh.trainer_sequence = 1  # devices that share weights and a row's tokens
  mesh.trainer_tensor = 1  # devices that share heads and MLP
  mesh.num_generators = 1  # generator meshes
  mesh.generator_tensor = 1  # devices of each
  mesh.lanes = 1  # of each generator mesh; each serves one version at a time
  mesh.colocated = False  # generators take turns on the trainer's devices
  return mesh


def _generator() -> config_dict.ConfigDict:
  generator = config_dict.ConfigDict()
  generator.slots = 16  # requests decoded at once, a lane
  # "auto" is by the device, and logged; or "xla" | "tpu" | "gpu"
  generator.attention = "auto"
  generator.page_size = 64  # tokens
  # Of each mesh; 0 = enough for all of its slots at their limit, if they fit.
  generator.num_pages = 0
  # Where num_pages is 0: share that the pages may take of the memory that a
  # device, or a CPU's host, has left beside all params.
  generator.memory_share = 0.8
  generator.max_length = 64  # tokens of prompt and completion
  generator.max_new_tokens = 32  # stop token included
  # Most prompt tokens to prefill between two chunks of decode steps.
  generator.prefill_chunk = 512
  generator.chunk_steps = 8  # decode steps between two looks by the host
  # Chunks under way while the host reads one; or such as "1". "auto" is 1, on a
  # CPU, where nothing waits for the host, 0.
  generator.chunks_ahead = "auto"
  generator.temperature = 1.0  # in training, as are the next three
  generator.top_k = 0  # keep so many of the likeliest tokens; 0 = all
  generator.top_p = 1.0  # keep the likeliest that hold this share; 1 = all
  generator.min_p = 0.0  # keep from this share of the largest on; 0 = all
  generator.stop_strings = ()  # end a completion, beside tokenizer.stop_ids
  # The longest run of tokens whose repetition ends a completion; 0 = off.
  generator.repeated_tokens = 0
  generator.repetitions = 8  # of a run in a row that end it
  generator.dtype = "float32"  # of weights and KV pages; or "bfloat16"
  # "int8" halves what decoding reads of bfloat16 and costs mismatch_kl_k3, seen
  # at each step; raise runtime.canary_tolerance with it. "same" is dtype. The
  # quickstart's summary, 2 CPU cores: 5e-13 nats a token, int8 weights 3.1e-5,
  # int8 KV 2.1e-4, both 1.5e-4 (with --config.runtime.canary_tolerance=0.1).
  generator.weights_dtype = "same"
  # The same of KV pages, with a scale for each token and head. Only attention
  # in plain XLA reads them, so that it is slower than a kernel.
  generator.kv_dtype = "same"
  return generator


def _coordinator() -> config_dict.ConfigDict:
  coordinator = config_dict.ConfigDict()
  # "dora" | "sync" | "one_step_off" | "partial_rollout" | "replication"
  coordinator.schedule = "dora"
  # K, in versions, of dora and partial_rollout; the others have their own.
  coordinator.max_staleness = 1
  coordinator.prompts_per_batch = 8  # groups in a training step
  coordinator.group_size = 8  # trajectories of one prompt
  coordinator.rollout_groups = "auto"  # groups in flight; or such as "24"
  coordinator.num_steps = 100  # training steps, hence versions
  coordinator.oversample = 1.25  # replication: groups started for each trained
  coordinator.evict = False  # dora: regenerate stragglers, do not wait (not C2)
  # Drop groups whose members all reach evaluation.solved_reward, or none does,
  # and start others; shaping has no say. After so many batches' worth of
  # groups dropped in a row the run ends.
  coordinator.filter_groups = False
  coordinator.filter_patience = 20
  # Trained groups that a step takes again, for each new one; the batch grows by
  # them. They too are max_staleness versions old at most, and no group is in
  # more than max_uses steps.
  coordinator.reuse_ratio = 0.0
  coordinator.max_uses = 2
  # Algorithm 1, which shares generators out among versions; dora alone uses it.
  coordinator.repartition = True  # False: a generator changes only when empty
  coordinator.moves = True  # carry live requests away from one that changes
  coordinator.filling = True  # new groups for idle slots of legacy versions
  coordinator.balance_on_step = True  # share out after each step
  coordinator.balance_period_s = 1.0  # and so often; 0 = never by the clock
  coordinator.kv_pressure = 0.9  # and from this share of pages; above 1 = never
  return coordinator


def _trainer() -> config_dict.ConfigDict:
  trainer = config_dict.ConfigDict()
  trainer.optimizer = "adamw"  # | "muon" | "adafactor"
  trainer.lr = 1e-4  # at its highest
  trainer.warmup_steps = 0  # updates from lr 0 to lr
  # Of lr after warm-up; "linear" and "cosine" fall to 0.
  trainer.schedule = "constant"
  trainer.b1 = 0.9  # AdamW, and what muon leaves to it
  trainer.b2 = 0.999
  trainer.eps = 1e-8
  trainer.momentum = 0.95  # muon, of the layers' matrices
  trainer.weight_decay = 0.0
  trainer.clip_norm = 1.0  # of the whole gradient
  # Of a running average of the params, for dora_jax.export; 0 keeps none.
  trainer.ema_decay = 0.0
  # Adapters of this rank are trained, not the params; 0 trains the params.
  trainer.lora_rank = 0
  trainer.lora_alpha = 16.0  # over the rank: how much they count
  # Of "query", "key", "value", "output", "gate", "up", "down".
  trainer.lora_targets = ("query", "key", "value", "output")
  # What generators are sent with each version: "merged" sends all params, of
  # which decoding is the fastest; "adapter" the adapters alone, which are added
  # up layer by layer in each pass over a base that is sent once.
  trainer.lora_publish = "merged"
  # "reinforce" | "ppo_clip" | "dual_clip" (LongCat's triplet clip) | "gspo" |
  # "cispo" | "aipo" | "vtrace" | "dppo_tv"; formulas in trainer/losses.py
  trainer.loss = "ppo_clip"
  # Which policy the loss compares with: "behavior" sampled the tokens;
  # "recomputed" is the same version by the training forward; "current" is what
  # the step starts from, as in decoupled PPO; "loglinear" lies between. The
  # last two take trajectories of several versions.
  trainer.proximal = "behavior"
  # Weights for proximal against behavior: "none" | "tis" | "icepop" |
  # "sequence_mask" | "geometric_mask" | "hispo"; see trainer/ratios.py
  trainer.correction = "none"
  trainer.aggregation = "token_mean"  # or "sequence_mean", "constant"
  trainer.clip_low = 0.2  # the ratio is clipped to [1 - low, 1 + high]
  trainer.clip_high = 0.2
  trainer.clip_loss = 3.0  # dual_clip: the ratio that a loss counts at most
  trainer.divergence = 0.2  # dppo_tv: how far a probability may move
  trainer.weight_floor = 0.5  # icepop, hispo: least importance weight
  trainer.weight_cap = 2.0  # of corrections, aipo, vtrace, dppo_tv and the kl
  trainer.sequence_floor = 0.99  # masks of sequences: least ratio
  trainer.sequence_cap = 1.01
  trainer.kl = (
    "none"  # to version 0: "k1" | "k2" | "k3" | "k3_straight_through"
  )
  trainer.kl_coefficient = 1e-3
  trainer.entropy_coefficient = 0.0  # of the bonus, a nat
  trainer.recompute_logprobs = False  # keeps max_staleness + 1 copies of params
  # "grpo" | "dr_grpo" | "rloo" | "pass_at_k" | "reinforce_pp" |
  # "reinforce_pp_baseline"; formulas in trainer/advantages.py. Or of tokens, by
  # a critic as large as the policy: "gae" | "vtrace"; in trainer/returns.py.
  trainer.advantage = "grpo"
  trainer.critic_lr = 1e-4
  trainer.critic_updates = 1  # in each step
  trainer.discount = 1.0  # a token
  trainer.trace_decay = 0.95  # gae: lambda
  # How far a value may go in the updates of a step after the first.
  trainer.value_clip = 0.2
  trainer.pass_k = 4  # pass_at_k: members of which one must be right
  trainer.advantage_per_version = (
    False  # reinforce_pp: normalize versions apart
  )
  # Components that the reward function returns beside "reward": name -> weight.
  trainer.reward_weights = config_dict.ConfigDict()
  trainer.overlong_penalty = 0.0  # of a completion of max_new_tokens
  trainer.overlong_buffer = 16  # tokens over which it grows from 0
  trainer.mask_truncated = False  # no loss on completions cut at their longest
  trainer.row_length = 64  # tokens of a packed row
  trainer.rows_per_batch = 8  # rows of a micro-batch, over all devices
  # "auto" is by the device, and logged; or "xla" | "tpu" | "gpu"
  trainer.attention = "auto"
  trainer.remat = False  # recompute layers in the backward pass
  trainer.logprob_chunk = 1024  # tokens projected on the vocabulary at once
  return trainer


def _evaluation() -> config_dict.ConfigDict:
  evaluation = config_dict.ConfigDict()
  evaluation.every_steps = 0  # 0 = only before and after
  evaluation.num_prompts = 0  # of the held-out ones; 0 = no evaluation
  evaluation.temperature = 0.0  # 0 takes the likeliest token
  evaluation.samples_per_prompt = 1
  evaluation.solved_reward = 1.0  # least reward of a solved prompt
  return evaluation


def _checkpoint() -> config_dict.ConfigDict:
  checkpoint = config_dict.ConfigDict()
  checkpoint.every_steps = 50  # 0 = only at the end, on SIGTERM and on Ctrl-C
  checkpoint.max_to_keep = 2  # the newest; older ones are deleted
  checkpoint.keep_every_steps = 0  # but never those of such steps; 0 = none
  # Go on with the run in the workdir; False refuses a workdir that holds one.
  checkpoint.resume = True
  return checkpoint


def _runtime() -> config_dict.ConfigDict:
  runtime = config_dict.ConfigDict()
  runtime.stall_s = 60.0  # a wait beyond it is reported
  runtime.give_up_s = 0.0  # and one beyond this ends the run; 0 = never
  runtime.canary_tolerance = 1e-2  # nats a token, trainer against generator
  return runtime
