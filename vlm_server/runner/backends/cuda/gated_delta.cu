// The gated delta rule over T tokens, one after the other, with the state in registers.
//
// q, k: (B, T, Hk, DK), v: (B, T, Hv, DV), of any strides but that the last axis is contiguous; g (decay) and beta: (B, T, Hv)
// float32, contiguous; state: (B, Hv, DV, DK) float32, contiguous. y: (B, T, Hv, DV), new_state: as state.
// A row of the state is kept by LANES threads, and a block has ROWS rows of one head. It reads TILE
// tokens at once into shared memory.

template <typename T, int DK, int TILE, int ROWS>
__device__ void gated_delta(
    const T* q, const T* k, const T* v, const float* g, const float* beta, const float* state,
    const mlx::core::cu::Strides& q_strides, const mlx::core::cu::Strides& k_strides,
    const mlx::core::cu::Strides& v_strides, int num_tokens, int key_heads, int heads, int dv, T* y,
    float* new_state) {
  constexpr int LANES = 8, EACH = DK / LANES, QUADS = EACH / 4;
  __shared__ float keys[TILE][DK], queries[TILE][DK], values[TILE][ROWS], decays[TILE], betas[TILE];
  const int head = blockIdx.y % heads, batch = blockIdx.y / heads;
  const int key_head = head / (heads / key_heads);
  const int lane = threadIdx.x % LANES, local = threadIdx.x / LANES;
  const int first = blockIdx.x * ROWS, row = first + local;
  const bool exists = row < dv;

  const size_t offset = (((size_t)batch * heads + head) * dv + min(row, dv - 1)) * DK;
  float s[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    s[i] = state[offset + (i / 4 * LANES + lane) * 4 + i % 4];

  const T* qs = q + batch * q_strides[0] + key_head * q_strides[2];
  const T* ks = k + batch * k_strides[0] + key_head * k_strides[2];
  const T* vs = v + batch * v_strides[0] + head * v_strides[2];
  const float* gs = g + (size_t)batch * num_tokens * heads + head;
  const float* bs = beta + (size_t)batch * num_tokens * heads + head;
  T* ys = y + ((size_t)batch * num_tokens * heads + head) * dv;

  for (int start = 0; start < num_tokens; start += TILE) {
    const int count = min(TILE, num_tokens - start);
    __syncthreads();
    for (int i = threadIdx.x; i < count * DK; i += blockDim.x) {
      const int t = i / DK, d = i % DK;
      keys[t][d] = (float)ks[(start + t) * k_strides[1] + d];
      queries[t][d] = (float)qs[(start + t) * q_strides[1] + d];
    }
    for (int i = threadIdx.x; i < count * ROWS; i += blockDim.x) {
      const int t = i / ROWS, d = min(first + i % ROWS, dv - 1);
      values[t][i % ROWS] = (float)vs[(start + t) * v_strides[1] + d];
    }
    for (int t = threadIdx.x; t < count; t += blockDim.x) {
      decays[t] = gs[(size_t)(start + t) * heads];
      betas[t] = bs[(size_t)(start + t) * heads];
    }
    __syncthreads();
    for (int t = 0; t < count; t++) {
      float kk[EACH], parts[4] = {};
      const float decay = decays[t];
#pragma unroll
      for (int i = 0; i < QUADS; i++) {
        *reinterpret_cast<float4*>(&kk[4 * i]) =
            *reinterpret_cast<const float4*>(&keys[t][(i * LANES + lane) * 4]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          s[4 * i + j] *= decay;
          parts[j] += s[4 * i + j] * kk[4 * i + j];
        }
      }
      float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
#pragma unroll
      for (int step = 1; step < LANES; step *= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
      const float delta = (values[t][local] - sum) * betas[t];
      float outs[4] = {};
#pragma unroll
      for (int i = 0; i < QUADS; i++) {
        const float4 qq = *reinterpret_cast<const float4*>(&queries[t][(i * LANES + lane) * 4]);
        const float both[4] = {qq.x, qq.y, qq.z, qq.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          s[4 * i + j] += kk[4 * i + j] * delta;
          outs[j] += s[4 * i + j] * both[j];
        }
      }
      float out = (outs[0] + outs[1]) + (outs[2] + outs[3]);
#pragma unroll
      for (int step = 1; step < LANES; step *= 2)
        out += __shfl_xor_sync(0xffffffffu, out, step);
      if (lane == 0 && exists)
        ys[(size_t)(start + t) * heads * dv + row] = (T)out;
    }
  }
  if (exists)
#pragma unroll
    for (int i = 0; i < EACH; i++)
      new_state[offset + (i / 4 * LANES + lane) * 4 + i % 4] = s[i];
}
