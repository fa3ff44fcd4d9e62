# ROCm image for MI250X (gfx90a) and MI300 (gfx942): DeepSpeed's ops, ROCm's apex, flash-attn's Composable Kernel
# build and our own kernels (hipified), all built ahead of time. Not built by our tests: they have neither a container
# engine nor a ROCm toolchain of this version. The versions below are pins, not measurements.
#
#   docker build -f docker/rocm.Dockerfile -t megatron-port:rocm .                       (hours)
#   docker run --rm --device=/dev/kfd --device=/dev/dri --ipc=host megatron-port:rocm megatron-port doctor --strict
#
# On Slingshot the site's libfabric and its RCCL plug-in (aws-ofi-nccl) are bound in from the host.
FROM rocm/dev-ubuntu-24.04:7.2-complete
ARG GPU_ARCHS="gfx90a;gfx942"
ARG MAX_JOBS=8
ARG TORCH_VERSION=2.11.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/rocm7.2
ARG APEX_COMMIT=daed85255d51476425080e7e6203f0bee6d7e4cc
ARG FLASH_ATTN_TAG=v2.8.3
# HIP_PLATFORM: where nvcc is also found, hipcc would silently build for NVIDIA.
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 DEVICE=rocm DS_ACCELERATOR=cuda HIP_PLATFORM=amd \
    ROCM_HOME=/opt/rocm PYTORCH_ROCM_ARCH=${GPU_ARCHS} TORCH_VERSION=${TORCH_VERSION} TORCH_INDEX=${TORCH_INDEX}
# Versions of the distribution's packages are not pinned: its mirrors keep only the newest of a release.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make g++ python3-dev python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron-port
# What the slow layers depend on, first: a change of the sources alone keeps them.
COPY constraints constraints
COPY scripts/setup.py scripts/setup_cuda.py scripts/setup_hashes.py scripts/setup_machine.py scripts/setup_ops.py scripts/
RUN python3 scripts/setup.py --device rocm --torch-version "${TORCH_VERSION}" --torch-index "${TORCH_INDEX}" \
    --until deepspeed
ENV PATH=/opt/megatron-port/.venv/bin:${PATH}
# This apex compiles at first use what was not built here, and a skipped op is no error to its setup: ask its list.
RUN git clone https://github.com/ROCm/apex /opt/src/apex \
 && git -C /opt/src/apex checkout "${APEX_COMMIT}" \
 && APEX_BUILD_CPP_OPS=1 APEX_BUILD_CUDA_OPS=1 MAX_JOBS="${MAX_JOBS}" \
    python -m pip install -v --no-cache-dir --no-build-isolation --no-deps /opt/src/apex \
 && rm -rf /opt/src/apex \
 && python -c "from apex.git_version_info_installed import installed_ops as o; assert o['amp_C'] and o['fused_layer_norm_cuda'], o" \
 && python -c "import amp_C, fused_layer_norm_cuda as f; amp_C.multi_tensor_scale, f.forward_affine"
# BUILD_TARGET=rocm without the Triton switch is the Composable Kernel build.
RUN git clone --branch "${FLASH_ATTN_TAG}" https://github.com/Dao-AILab/flash-attention /opt/src/flash \
 && git -C /opt/src/flash submodule update --init csrc/composable_kernel \
 && BUILD_TARGET=rocm GPU_ARCHS="${GPU_ARCHS}" FLASH_ATTENTION_FORCE_BUILD=TRUE MAX_JOBS="${MAX_JOBS}" \
    python -m pip install -v --no-cache-dir --no-build-isolation --no-deps /opt/src/flash \
 && rm -rf /opt/src/flash \
 && python -c "import torch, flash_attn_2_cuda"
COPY . .
# The image is not made if a run would build something, or fall back to something slower. No GPU is needed for it.
RUN make setup DEVICE=rocm \
 && make kernels DEVICE=rocm KERNELS="cpu rocm" ARCHS="${GPU_ARCHS}" \
 && megatron-port doctor --strict --device rocm --set engine=deepspeed \
 && megatron-port doctor --strict --device rocm
CMD ["megatron-port", "doctor", "--strict"]
