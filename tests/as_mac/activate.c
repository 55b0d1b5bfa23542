/* launch_activate_socket(3) for jobs of tests/as_mac/launchd.py, which names the sockets in
   AS_MAC_SOCKETS: "name=descriptor,...". As there, they can be had once for each start of a job. */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int launch_activate_socket(const char *name, int **descriptors, size_t *count)
{
    const char *sockets = getenv("AS_MAC_SOCKETS");
    const char *taken = getenv("AS_MAC_SOCKETS_TAKEN");
    size_t length = strlen(name);
    int mark;

    if (sockets == NULL || taken == NULL)
        return ESRCH;
    while (strncmp(sockets, name, length) != 0 || sockets[length] != '=') {
        sockets = strchr(sockets, ',');
        if (sockets == NULL)
            return ENOENT;
        sockets++;
    }
    mark = open(taken, O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (mark < 0)
        return EALREADY;
    close(mark);
    *descriptors = malloc(sizeof **descriptors);
    if (*descriptors == NULL)
        return ENOMEM;
    (*descriptors)[0] = atoi(sockets + length + 1);
    *count = 1;
    return 0;
}
