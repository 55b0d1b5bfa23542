// Tensor core products of 16-bit numbers, summed in float32, and copies into shared memory for them.

__device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}

__device__ inline uint32_t pack(float low, float high, __half) {
  __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}

__device__ inline void copy_async(void* shared, const void* global, bool is_there) {
  const int bytes = is_there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   (uint32_t)__cvta_generic_to_shared(shared)),
               "l"(global), "r"(bytes));
}
