"""Measurements of models and kernels: memory, speed, quality, and whether every op agrees with its reference.

What each command stands on, from its rows down to what it measures with:

- memory: memory (the sweep), memory_rows, growth, outlook and workspace (what is predicted), capacity,
  forks and peak (a point, in a process of its own)
- speed: timings (the sweep), speed, speed_rows, agreement, engine (what can be timed), engines, decoding,
  peers and one file a peer (llamacpp, gpu_peers, vllm_peer)
- predict/, compare/, quality/, gpu/: one folder each; doctor: the ops
- all of them: results and place (what is kept), executor and ray/ (where it runs), shapes and hybrids (random
  weights), machine (the yardstick), units
"""
