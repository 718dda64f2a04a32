// Counters by which thread blocks of one launch wait for others.
#pragma once

#include "cuda/hopper/ptx.cuh"

namespace rapt::cuda {

// Counts one more. What the thread has done or seen before, whoever sees the count sees too.
__device__ inline void count_up(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// The count so far. The thread then sees all that was written before these counts.
__device__ inline int counted(const int* counter) {
  int now;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

// Waits until others have counted to `count`. Later copies by TMA see what they wrote.
__device__ inline void wait_for_count(const int* counter, int count) {
  while (counted(counter) < count) __nanosleep(100);
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace rapt::cuda
