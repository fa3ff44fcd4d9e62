# CUDA image for A100, H100 and H200 (compute capability 8.0 and 9.0): DeepSpeed's ops, apex, flash-attn and our own
# kernels, all built ahead of time.
# Not built by our tests: they have no container engine. The versions below are pins, not measurements.
#
#   docker build -f docker/cuda.Dockerfile -t megatron-port:cuda .                       (an hour or more)
#   docker run --rm --gpus all --ipc=host megatron-port:cuda make gpu-check DEVICE=cuda
#
# The base must have the CUDA version of torch's build (torch 2.13.0 from PyPI: 13.0), or DeepSpeed refuses to build.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG TORCH_ARCHS="8.0;9.0"
ARG FLASH_ARCHS="80;90"
ARG KERNEL_ARCHS="sm_80,sm_90"
ARG MAX_JOBS=8
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG FLASH_ATTN=2.8.3.post2
# No GPU is visible while an image is built: the accelerator and the architectures must be named.
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 DEVICE=cuda DS_ACCELERATOR=cuda \
    TORCH_CUDA_ARCH_LIST=${TORCH_ARCHS} CUDA_HOME=/usr/local/cuda TORCH_VERSION=${TORCH_VERSION} TORCH_INDEX=${TORCH_INDEX}
# Versions of the distribution's packages are not pinned: its mirrors keep only the newest of a release.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make g++ python3-dev python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron-port
# What the slow layers depend on, first: a change of the sources alone keeps them.
COPY constraints constraints
COPY scripts/setup.py scripts/setup_cuda.py scripts/setup_hashes.py scripts/setup_machine.py scripts/setup_ops.py scripts/
RUN python3 scripts/setup.py --device cuda --torch-version "${TORCH_VERSION}" --torch-index "${TORCH_INDEX}" \
    --until deepspeed
ENV PATH=/opt/megatron-port/.venv/bin:${PATH}
# apex: fused norms, FusedAdam, multi-tensor ops. PyPI's package of that name is another one.
RUN git clone https://github.com/NVIDIA/apex /opt/src/apex \
 && git -C /opt/src/apex checkout "${APEX_COMMIT}" \
 && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS="${MAX_JOBS}" \
    python -m pip install -v --no-cache-dir --no-build-isolation --no-deps /opt/src/apex \
 && rm -rf /opt/src/apex \
 && python -c "import torch, amp_C, fused_layer_norm_cuda"
# flash-attn: 72 files, 4 to 6 GB of memory each; lower MAX_JOBS where memory is short.
RUN FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="${FLASH_ARCHS}" MAX_JOBS="${MAX_JOBS}" \
    python -m pip install -v --no-cache-dir --no-build-isolation --no-deps --no-binary flash-attn \
    "flash-attn==${FLASH_ATTN}" \
 && python -c "import torch, flash_attn_2_cuda"
COPY . .
# The image is not made if a run would build something, or fall back to something slower. No GPU is needed for it.
RUN make setup DEVICE=cuda \
 && make kernels DEVICE=cuda KERNELS="cpu cuda" ARCHS="${KERNEL_ARCHS}" \
 && megatron-port doctor --strict --device cuda --set engine=deepspeed \
 && megatron-port doctor --strict --device cuda
CMD ["megatron-port", "doctor", "--strict"]
