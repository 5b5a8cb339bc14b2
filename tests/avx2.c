/* Preloaded into a process, makes the processor look like one with AVX2 but without AVX-512, VNNI or AMX:
   libraries that choose kernels by CPUID then take those they would take there (Linux, x86-64, with CPUID faulting).
   cc -shared -fPIC -O1 -o avx2.so avx2.c -ldl && LD_PRELOAD=./avx2.so command */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012

static struct sigaction previous;

static void answer_cpuid(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *instruction = (const unsigned char *)registers[REG_RIP];
    if (info->si_code != SI_KERNEL || instruction[0] != 0x0f || instruction[1] != 0xa2) {
        if (previous.sa_flags & SA_SIGINFO) { previous.sa_sigaction(number, info, context); return; }
        if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) { previous.sa_handler(number); return; }
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, part, a, b, c, d);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 7 && part == 0) {
        /* AVX512: F DQ IFMA PF ER CD BW VL; VBMI VBMI2 VNNI BITALG VPOPCNTDQ; 4VNNIW 4FMAPS VP2INTERSECT FP16; AMX */
        b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);
        c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
        d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);
    }
    if (leaf == 7 && part == 1) {
        a &= ~(1u << 4 | 1u << 5 | 1u << 21 | 1u << 23); /* AVX-VNNI, AVX512-BF16, AMX-FP16, AVX-IFMA */
        d &= ~(1u << 4 | 1u << 5 | 1u << 8 | 1u << 10 | 1u << 19);
    }
    registers[REG_RAX] = a; registers[REG_RBX] = b; registers[REG_RCX] = c; registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

/* Handlers that others install later (Python's faulthandler) come after this one */
int sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    static int (*real)(int, const struct sigaction *, struct sigaction *);
    if (!real) real = dlsym(RTLD_NEXT, "sigaction");
    if (number != SIGSEGV) return real(number, action, before);
    if (before) *before = previous;
    if (action) previous = *action;
    return 0;
}

__attribute__((constructor)) static void begin(void) {
    int (*real)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    struct sigaction action = {.sa_sigaction = answer_cpuid, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    real(SIGSEGV, &action, &previous);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
}
