// Weights of a linear layer, dense or quantized, as operands of tensor cores. Of a block of 64 numbers of
// a row, a thread (`member` of four) has the eight at member * STRIDE, and the eight that begin FAR after
// these. Which number is which in the tensor core's product does not matter, as long as x agrees with it.

// Weights as they are.
template <typename T>
struct Dense {
  static constexpr int STRIDE = 8, FAR = 32;
  struct Packed {
    uint4 near, far;
  };
  const T* weight;

  __device__ Packed fetch(int row, int depth, int k) const {
    const T* at = weight + (size_t)row * depth + k;
    return {__ldcs(reinterpret_cast<const uint4*>(at)), __ldcs(reinterpret_cast<const uint4*>(at + FAR))};
  }

  __device__ static void unpack(const Packed& packed, uint32_t (&numbers)[8]) {
    *reinterpret_cast<uint4*>(&numbers[0]) = packed.near;
    *reinterpret_cast<uint4*>(&numbers[4]) = packed.far;
  }
};

// Weights in BITS, 4 or 8, with a scale and an offset for each GROUP of a row.
template <typename T, int BITS, int GROUP>
struct Quantized {
  static constexpr int STRIDE = 16, FAR = 8, WORDS = BITS / 2;
  struct Packed {
    alignas(16) uint32_t words[WORDS];
    T scale, offset;
  };
  const uint32_t* weight;
  const T *scales, *offsets;

  __device__ Packed fetch(int row, int depth, int k) const {
    const size_t at = (size_t)row * depth + k;
    Packed packed;
    if constexpr (WORDS == 2)
      *reinterpret_cast<uint2*>(packed.words) = __ldcs(reinterpret_cast<const uint2*>(weight + at / 8));
    else
      *reinterpret_cast<uint4*>(packed.words) = __ldcs(reinterpret_cast<const uint4*>(weight + at / 4));
    packed.scale = scales[at / GROUP];
    packed.offset = offsets[at / GROUP];
    return packed;
  }

  __device__ static void unpack(const Packed& packed, uint32_t (&numbers)[8]) {
    const float scale = (float)packed.scale, offset = (float)packed.offset;
#pragma unroll
    for (int i = 0; i < 8; i++)
      numbers[i] = pack(
          number(packed.words, 2 * i, scale, offset), number(packed.words, 2 * i + 1, scale, offset), T());
  }

  __device__ static float number(const uint32_t (&words)[WORDS], int i, float scale, float offset) {
    constexpr uint32_t MASK = (1u << BITS) - 1, EACH = 32 / BITS;
    // 2^23 + n has n in its last bits: faster than a conversion.
    const uint32_t n = words[i / EACH] >> (i % EACH * BITS) & MASK;
    return fmaf(__uint_as_float(0x4B000000u | n) - 8388608.0f, scale, offset);
  }
};
