// y = x @ w.T + bias for few rows x, reading w once. A row's sums are added in the same order
// whatever other rows there are: it gets the same numbers alone as in a batch.
//
// w: (N, K), x: (M, K), bias: (N,) or null; K a multiple of 64, M at most 32. y is written in parts,
// (M, width) each, which have the next columns each.
// A block has 16 columns of y. Its warps share K in blocks of 64 and add up what they have. Of such
// a block a thread reads twice eight neighbours of each of two rows of w, in wide reads.

template <typename T, int PARTS>
struct Output {
  T* parts[PARTS];
  int widths[PARTS];

  __device__ void write(int row, int column, float value) const {
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      if (column >= 0 && column < widths[i])
        parts[i][(size_t)row * widths[i] + column] = (T)value;
      column -= widths[i];
    }
  }
};

template <int TILES, typename Weights, typename T, int PARTS>
__device__ void few_tiles(
    const Weights& w, const T* x, const T* bias, const Output<T, PARTS>& y, int num_rows,
    int num_columns, int depth) {
  constexpr int WARPS = 8;
  extern __shared__ float parts[];  // [WARPS][TILES][4][32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, member = lane % 4;
  const int column = blockIdx.x * 16 + group, first = member * Weights::STRIDE;
  const int low = min(column, num_columns - 1), high = min(column + 8, num_columns - 1);
  const T* rows[TILES];
  for (int tile = 0; tile < TILES; tile++)
    rows[tile] = x + (size_t)min(tile * 8 + group, num_rows - 1) * depth + first;

  float sums[TILES][4] = {};
#pragma unroll(TILES == 1 ? 4 : TILES == 2 ? 2 : 1)
  for (int k = warp * 64; k < depth; k += WARPS * 64) {
    uint32_t a[2][8];
    Weights::unpack(w.fetch(low, depth, k + first), a[0]);
    Weights::unpack(w.fetch(high, depth, k + first), a[1]);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      uint32_t b[8];
      *reinterpret_cast<uint4*>(&b[0]) = __ldg(reinterpret_cast<const uint4*>(rows[tile] + k));
      *reinterpret_cast<uint4*>(&b[4]) = __ldg(reinterpret_cast<const uint4*>(rows[tile] + k + Weights::FAR));
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const uint32_t both[4] = {a[0][j], a[1][j], a[0][j + 1], a[1][j + 1]};
        mma(sums[tile], both, b[j], b[j + 1], T());
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < TILES; tile++)
    for (int i = 0; i < 4; i++)
      parts[((warp * TILES + tile) * 4 + i) * 32 + lane] = sums[tile][i];
  __syncthreads();
  for (int i = threadIdx.x; i < TILES * 128; i += WARPS * 32) {
    const int tile = i / 128, part = i / 32 % 4, owner = i % 32;
    const int row = tile * 8 + owner % 4 * 2 + part % 2;
    const int n = blockIdx.x * 16 + owner / 4 + part / 2 * 8;
    if (row < num_rows && n < num_columns) {
      float sum = 0.0f;
      for (int each = 0; each < WARPS; each++)
        sum += parts[((each * TILES + tile) * 4 + part) * 32 + owner];
      if (bias)
        sum += (float)bias[n];
      y.write(row, n, sum);
    }
  }
}

template <typename Weights, typename T, int PARTS>
__device__ void skinny_linear(
    const Weights& w, const T* x, const T* bias, const Output<T, PARTS>& y, int num_rows, int num_columns,
    int depth) {
  if (num_rows <= 8)
    few_tiles<1>(w, x, bias, y, num_rows, num_columns, depth);
  else if (num_rows <= 16)
    few_tiles<2>(w, x, bias, y, num_rows, num_columns, depth);
  else if (num_rows <= 24)
    few_tiles<3>(w, x, bias, y, num_rows, num_columns, depth);
  else
    few_tiles<4>(w, x, bias, y, num_rows, num_columns, depth);
}
