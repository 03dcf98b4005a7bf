/* A process whose wall clock is off, for tests that set clocks (LD_PRELOAD): by as many seconds as stand in a file, which
 * it maps. Monotonic clocks are left alone. A wait that ends by the wall clock would go wrong when a real clock is set;
 * each kind of it is written to stderr once. libfaketime 0.9.10 does not do: under it, Python's time.sleep fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_s;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_sem)(sem_t *, const struct timespec *);
static int (*real_cond)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("BATON_TEST_WALL_CLOCK");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_sem = dlsym(RTLD_NEXT, "sem_timedwait");
    real_cond = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    if (fd >= 0) {
        void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
        if (mapped != MAP_FAILED)
            offset_s = mapped;
        close(fd);
    }
}

static int64_t offset(void) { return offset_s == NULL ? 0 : *offset_s; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = real_gettime == NULL ? (int)syscall(SYS_clock_gettime, clock, now) : real_gettime(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found))
        return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (result != NULL)
        *result = found.tv_sec;
    return found.tv_sec;
}

/* No machine has been up for 30 years: a later instant is one of the wall clock. */
static struct timespec checked(const struct timespec *until, const char *name, int *is_said) {
    struct timespec found = *until;
    if (found.tv_sec > 1000000000) {
        found.tv_sec -= offset();
        if (!*is_said)
            dprintf(2, "a wait by the wall clock: %s\n", name);
        *is_said = 1;
    }
    return found;
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
    static int is_said;
    struct timespec found = checked(until, "sem_timedwait", &is_said);
    return real_sem(sem, &found);
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int is_said;
    struct timespec found = checked(until, "pthread_cond_timedwait", &is_said);
    return real_cond(cond, mutex, &found);
}
