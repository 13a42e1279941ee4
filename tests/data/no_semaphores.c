/* A library for LD_PRELOAD: no semaphore can be opened, as where /dev/shm is full or not mounted.
   SEM_ERRNO is the number of the system's error. */
#include <errno.h>
#include <semaphore.h>
#include <stdlib.h>

sem_t *sem_open(const char *name, int flags, ...)
{
    errno = atoi(getenv("SEM_ERRNO"));
    return SEM_FAILED;
}
